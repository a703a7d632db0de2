# SPDX-License-Identifier: Apache-2.0
"""Closed-form block pair counts against counting; features add up."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cost as oracle

from sparsebalance_megatron.cost.work_model import FEATURES, features, work_model_named
from sparsebalance_megatron.selector_registry import BUILT_IN

TOKENS = st.integers(0, 90)
BUDGETS = st.integers(1, 12)
BLOCK_SIZES = st.sampled_from([1, 2, 8, 16])
WORK = work_model_named("previous-block")


def attended_block_pairs(tokens, budget, block_size):
    return WORK.attended_pairs(np.asarray(tokens) / block_size, budget)


def visible_block_pairs(tokens, block_size):
    return WORK.visible_pairs(tokens / block_size)


@settings(max_examples=150)
@given(tokens=TOKENS, budget=BUDGETS, block_size=BLOCK_SIZES)
def test_pairs_equal_the_count(tokens: int, budget: int, block_size: int) -> None:
    counted = oracle.attended_block_pairs(tokens, budget, block_size)
    assert attended_block_pairs(tokens, budget, block_size) == pytest.approx(counted, rel=1e-12)


@given(tokens=TOKENS, block_size=BLOCK_SIZES)
def test_visible_pairs_are_pairs_without_a_budget(tokens: int, block_size: int) -> None:
    counted = oracle.attended_block_pairs(tokens, math.inf, block_size)
    assert visible_block_pairs(tokens, block_size) == pytest.approx(counted, rel=1e-12)


@settings(max_examples=150)
@given(tokens=st.integers(1, 90), block_size=BLOCK_SIZES, data=st.data())
def test_growth_is_that_of_the_counted_pairs(tokens: int, block_size: int, data) -> None:
    """From one budget to another, both up to the document's blocks; the rest does not move."""
    budgets = st.integers(1, -(-tokens // block_size))
    low, high = data.draw(budgets), data.draw(budgets)
    per_block, less = WORK.growth(np.array([low, high]))
    predicted = np.diff(per_block) * tokens / block_size - np.diff(less)
    counted = [oracle.attended_block_pairs(tokens, k, block_size) for k in (low, high)]
    assert predicted == pytest.approx(np.diff(counted), abs=1e-9)


def test_the_router_scores_what_selects() -> None:
    sizes = {name: work_model_named(name).scores_per_visible_pair(8, 2, 64) for name in BUILT_IN}
    # 16 probes of a block with 8 heads and 64 keys.
    probed = dict.fromkeys(("vertical-slash", "vertical-slash-last-queries"), 8192)
    assert sizes == probed | {"previous-block": 2, "token-kv-head": 128, "token-query-head": 512}


@given(documents=st.lists(st.tuples(st.integers(1, 500), BUDGETS), min_size=2, max_size=6))
def test_features_add_up_over_documents(documents: list[tuple[int, int]]) -> None:
    lengths, budgets = zip(*documents, strict=True)
    whole = features(lengths, budgets, 16, WORK)
    parts = sum(features([tokens], budget, 16, WORK) for tokens, budget in documents)
    one_micro_batch = np.array([len(documents) - 1, 0, 0, 0, 0])
    np.testing.assert_allclose(whole, parts - one_micro_batch, rtol=1e-12)


def test_feature_order() -> None:
    row = dict(zip(FEATURES, features([256, 512], [1, 1], 256, WORK), strict=True))
    assert row == {
        "micro_batches": 1,
        "sequences": 2,
        "tokens": 768,
        "block_pairs": 3,
        "visible_block_pairs": 4,
    }
