# SPDX-License-Identifier: Apache-2.0
"""Base budgets by layer: never more time than uniform ones, more for the sensitive."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from step_cases import SHAPE

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.work_model import QUERY_BLOCK, features
from sparsebalance_megatron.layer_budgets import DENSE, base_budgets
from sparsebalance_megatron.plan.budgets.by_layer import (
    LEAST_SHARE,
    budgets_by_sensitivity,
    pairs_by_budget,
    with_layer_budgets,
)
from sparsebalance_megatron.plan.job import Job

SENSITIVITIES = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=12).filter(any)
BASES = st.integers(1, 20)
LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=6)


def pairs(lengths, budgets):
    """Naive: every block of every sample reads the lesser of its place and the budget."""
    return sum(
        min(place, budget)
        for budget in budgets
        for blocks in lengths
        for place in range(1, blocks + 1)
    )


def by_pairs(sensitivity_L, base, lengths, dense_time=np.inf, own_lists=False):
    time_K = pairs_by_budget(np.array(lengths, float), QUERY_BLOCK).sum(1)
    return budgets_by_sensitivity(
        sensitivity_L, base, time_K, dense_time=dense_time, own_lists=own_lists
    )


@given(SENSITIVITIES, BASES, LENGTHS, st.booleans())
def test_no_more_pairs_than_one_budget_everywhere_and_hardly_fewer(
    sensitivities, base, lengths, own_lists
):
    sensitivity_L = np.array(sensitivities)
    found_L = by_pairs(sensitivity_L, base, lengths, own_lists=own_lists)
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


@given(SENSITIVITIES, BASES, LENGTHS, st.floats(0.05, 1.5), st.booleans())
def test_dense_layers_stand_in_for_lists_that_take_as_long(
    sensitivities, base, lengths, share, own_lists
):
    sensitivity_L = np.array(sensitivities)
    dense_time = share * pairs(lengths, [max(lengths)])
    found_L = by_pairs(sensitivity_L, base, lengths, dense_time, own_lists)
    dense_L = found_L == DENSE
    sparse = [pairs(lengths, [budget]) for budget in found_L[~dense_L]]
    assert all(each < dense_time for each in sparse)
    total, allowed = sum(sparse) + dense_time * dense_L.sum(), pairs(lengths, [base] * len(found_L))
    assert total <= allowed * (1.0 + 1e-8)
    assert dense_time > pairs(lengths, [base]) or dense_L.all()


def test_the_most_sensitive_layers_are_whole():
    """Six of thirty layers."""
    sensitivity_L = np.linspace(0.2, 0.3, 30)
    sensitivity_L[[7, 8, 17, 18]] = 0.5, 0.6, 0.8, 0.7
    found_L = by_pairs(sensitivity_L, 8, [32] * 5)
    assert (found_L[[7, 8, 17, 18, 29, 28]] == 32).all()
    assert set(found_L[:7]) == {5}
    # Where tokens have lists, a tenth is whole, and the others follow squares.
    found_L = by_pairs(sensitivity_L, 8, [32] * 5, own_lists=True)
    assert (found_L[[8, 17, 18]] == 32).all() and 12 < found_L[7] < 16
    assert set(np.delete(found_L, [7, 8, 17, 18])) == {6, 7}


def test_time_is_in_proportion_to_squares():
    """12 blocks beyond the least of 5: 5 fill the first layer; the squares of the others are as
    4 to 4 to 1."""
    sensitivity_L = np.array([0.6, 1.0, 0.3, 0.6])
    found_L = budgets_by_sensitivity(sensitivity_L, 8, np.arange(11.0), own_lists=True)
    assert found_L.tolist() == [8, 10, 6, 8]
    for own_lists in (False, True):
        alike_L = budgets_by_sensitivity(np.zeros(4), 8, np.arange(11.0), own_lists=own_lists)
        assert alike_L.tolist() == [8] * 4


def config_with(tmp_path, sensitivities, **choices):
    path = tmp_path / "sensitivity.json"
    path.write_text(
        msgspec.json.encode(
            {
                **{"sensitivities": sensitivities, "measure": "", "block_size": 64},
                **{"samples": 1, "versions": {}, "date": "", "format_version": 1},
            }
        ).decode()
    )
    return SparseBalanceConfig(sensitivity=str(path), base_budget=8, block_size=64, **choices)


def resolved(config, layers, tokens, stages=1):
    job = Job.even(layers=layers, ranks=1, stages=stages)
    cost = CostModel.analytic(SHAPE, config.block_size, selection=config.selection)
    return with_layer_budgets(config, job, np.array(tokens), cost)


def test_a_file_becomes_budgets_of_layers(tmp_path):
    config = config_with(tmp_path, [0.1, 0.9, 0.1], selection="previous-block")
    found, lines = resolved(config, 3, [64 * 40] * 4)
    assert found.sensitivity is None
    budgets = base_budgets(found.base_budget, found.layer_budgets, 3)
    assert budgets[1] > 8 > budgets[0] == budgets[2]
    (line,) = lines
    assert found.layer_budgets in line
    without = replace(config, sensitivity=None)
    assert resolved(without, 3, [64]) == (without, ())


@pytest.mark.parametrize(("selection", "whole"), [("token-kv-head", 2), ("previous-block", 4)])
def test_fewer_layers_are_whole_where_tokens_have_lists(selection, whole, tmp_path):
    sensitivities = [1.0 / (1 + layer) for layer in range(20)]
    config = config_with(tmp_path, sensitivities, selection=selection, attention="tokens")
    budgets = base_budgets(8, resolved(config, 20, [64 * 32])[0].layer_budgets, 20)
    assert budgets.count(32) == whole


def test_where_dense_attention_is_as_fast_as_the_base_budget_no_layer_has_lists(tmp_path):
    """Dense attention of 24 blocks takes less time than lists by token of eight, not than lists by
    block."""
    tokens = [64 * 24] * 2
    config = config_with(tmp_path, [0.1, 0.9, 0.5, 0.1])
    assert resolved(config, 4, tokens)[0].layer_budgets == "dense:0-3"
    by_block = config_with(tmp_path, [0.1, 0.9, 0.5, 0.1], selection="previous-block")
    budgets = base_budgets(8, resolved(by_block, 4, tokens)[0].layer_budgets, 4)
    assert budgets[1] == DENSE and DENSE not in (budgets[0], budgets[3])
    by_token_kernels = replace(config, attention="tokens")
    assert "dense" not in resolved(by_token_kernels, 4, tokens)[0].layer_budgets


def attention_ms(budgets, tokens, dense_up_to):
    """Predicted of some layers over all samples."""
    cost = CostModel.analytic(SHAPE, 64, selection="previous-block")
    total = 0.0
    for budget in budgets:
        for length in tokens:
            dense = budget == DENSE or length <= dense_up_to * budget / 8 or length <= 64 * budget
            row = features([length], np.inf if dense else budget, 64, cost.work)
            for part in (Part.DENSE_ATTENTION,) if dense else (Part.ATTENTION, Part.ROUTER):
                total += sum(float(row @ cost.coefficients_ms(part, way)) for way in Direction)
    return total


@pytest.mark.parametrize("dense_up_to", [0, 64 * 10])
def test_no_pipeline_stage_takes_longer_and_layers_that_would_need_to_are_named(
    dense_up_to, tmp_path
):
    """Not where short documents are dense in all layers, either."""
    tokens = [64 * 32] * 2 + [64 * 9, 64 * 5]
    sensitivities = [0.1] * 12 + [0.9, 0.8, 0.7, 0.6] + [0.1] * 8
    choices = {"selection": "previous-block", "dense_up_to": str(dense_up_to)}
    config = config_with(tmp_path, sensitivities, **choices)
    found, lines = resolved(config, 24, tokens)
    assert len(lines) == 1
    found, lines = resolved(config, 24, tokens, stages=6)
    base_L = np.array(base_budgets(8, found.layer_budgets, 24))
    (uniform_ms,), (*stages_ms,) = (
        [attention_ms(each, tokens, dense_up_to) for each in layers]
        for layers in ([[8] * 4], base_L.reshape(6, 4))
    )
    assert 0.8 * uniform_ms < min(stages_ms) and max(stages_ms) < 1.000001 * uniform_ms
    assert any(line.startswith("layers ") and "15" in line for line in lines[1:])


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
        resolved(config_with(tmp_path, sensitivities), 3, [64] * 4)
    assert "--sparse-balance-sensitivity" in str(refused.value)


def test_both_ways_to_give_budgets_by_layer_are_one_too_many():
    with pytest.raises(ConfigError, match="both give budgets by layer"):
        SparseBalanceConfig(sensitivity="file.json", layer_budgets="dense:0")
