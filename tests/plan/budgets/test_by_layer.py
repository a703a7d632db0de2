# SPDX-License-Identifier: Apache-2.0
"""Base budgets by layer: never more pairs than uniform ones, more for the sensitive."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.sensitivity import Sensitivities
from sparsebalance_megatron.cost.work_model import QUERY_BLOCK
from sparsebalance_megatron.layer_budgets import base_budgets
from sparsebalance_megatron.plan.budgets.by_layer import (
    LEAST_SHARE,
    budgets_by_sensitivity,
    with_layer_budgets,
)


def pairs(lengths, budgets):
    """Naive: every block of every sample reads the lesser of its place and the budget."""
    return sum(
        min(place, budget)
        for budget in budgets
        for blocks in lengths
        for place in range(1, blocks + 1)
    )


@given(
    st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).filter(any),
    st.integers(1, 20),
    st.lists(st.integers(1, 60), min_size=1, max_size=6),
)
def test_no_more_pairs_than_one_budget_everywhere_and_hardly_fewer(sensitivities, base, lengths):
    sensitivity_L = np.array(sensitivities)
    found_L = budgets_by_sensitivity(sensitivity_L, base, np.array(lengths, float), QUERY_BLOCK)
    allowed = pairs(lengths, [base] * len(found_L))
    assert pairs(lengths, found_L) <= allowed
    longest = max(lengths)
    assert (found_L <= longest).all()
    assert (found_L >= min(max(np.ceil(LEAST_SHARE * min(base, longest)), 2), base, longest)).all()
    order = np.argsort(-sensitivity_L, kind="stable")
    assert (np.diff(found_L[order]) <= 1).all()
    for layer in range(len(found_L)):
        more_L = found_L.copy()
        more_L[layer] += 1
        is_whole = found_L[layer] >= longest
        assert is_whole or pairs(lengths, more_L) > allowed


def test_the_most_sensitive_layers_are_whole():
    """Six of thirty layers of a short context, and less than two of one of twice the length."""
    sensitivity_L = np.linspace(0.2, 0.3, 30)
    sensitivity_L[[7, 8, 17, 18]] = 0.5, 0.6, 0.8, 0.7
    found_L = budgets_by_sensitivity(sensitivity_L, 8, np.full(5, 32.0), QUERY_BLOCK)
    assert (found_L[[7, 8, 17, 18, 29, 28]] == 32).all()
    assert set(found_L[:7]) == {5}
    found_L = budgets_by_sensitivity(sensitivity_L, 8, np.full(5, 64.0), QUERY_BLOCK)
    assert (found_L[[17, 18]] == 64).all() and 5 < found_L[8] < 64
    assert set(np.delete(found_L, [8, 17, 18])) <= {5, 6}


def config_with(tmp_path, sensitivities):
    path = tmp_path / "sensitivity.json"
    path.write_text(
        msgspec.json.encode(
            {
                **{"sensitivities": sensitivities, "measure": "", "block_size": 64},
                **{"samples": 1, "versions": {}, "date": "", "format_version": 1},
            }
        ).decode()
    )
    return SparseBalanceConfig(sensitivity=str(path), base_budget=8, block_size=64)


def test_a_file_becomes_budgets_of_layers(tmp_path):
    config = config_with(tmp_path, [0.1, 0.9, 0.1])
    found = with_layer_budgets(config, 3, np.full(4, 64 * 40))
    assert found.sensitivity is None
    budgets = base_budgets(found.base_budget, found.layer_budgets, 3)
    assert budgets[1] > 8 > budgets[0] == budgets[2]
    without = replace(config, sensitivity=None)
    assert with_layer_budgets(without, 3, np.full(4, 64)) is without


@pytest.mark.parametrize(
    ("sensitivities", "message"),
    [
        ([0.1, 0.2], "is of 2 layers, the model has 3"),
        ([0.0, 0.0, 0.0], "all sensitivities are 0"),
        ([0.1, -0.2, 0.1], "sensitivities"),
        ([0.1, None, 0.1], "sensitivities"),
        ([], "is of 0 layers"),
    ],
)
def test_bad_files_are_refused_by_name(tmp_path, sensitivities, message):
    with pytest.raises(ConfigError, match=message) as refused:
        with_layer_budgets(config_with(tmp_path, sensitivities), 3, np.full(4, 64))
    assert "--sparse-balance-sensitivity" in str(refused.value)


def test_both_ways_to_give_budgets_by_layer_are_one_too_many():
    with pytest.raises(ConfigError, match="both give budgets by layer"):
        SparseBalanceConfig(sensitivity="file.json", layer_budgets="dense:0")


def test_the_file_holds_what_was_measured():
    given_ = Sensitivities(
        sensitivities=(0.5,), measure="m", block_size=64, samples=2, versions={}, date="2026-11-28"
    )
    assert msgspec.json.decode(given_.text(), type=Sensitivities) == given_
