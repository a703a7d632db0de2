# SPDX-License-Identifier: Apache-2.0
"""Features of a micro-batch: their order, and that they add up."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.cost.features import FEATURES, features
from sparsebalance_megatron.cost.work_model import work_model_named

BUDGETS = st.integers(1, 12)
WORK = work_model_named("previous-block")


@settings(max_examples=50, deadline=None)
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
