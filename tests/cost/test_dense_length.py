# SPDX-License-Identifier: Apache-2.0
"""The length of documents up to which dense attention takes no longer than sparse attention."""

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cost.cost_cases import IDENTITY, planted_table, predict_ms

from sparsebalance_megatron import flash_attention
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.dense_length import (
    crossing_tokens,
    dense_length_line,
    with_dense_length,
)
from sparsebalance_megatron.cost.fit import configured_cost_model
from sparsebalance_megatron.cost.model import CostModel, Efficiency
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.cost.work_model import features
from sparsebalance_megatron.learn.host_planner import HostJob
from sparsebalance_megatron.plan.job import Job

CHOICES = SparseBalanceConfig(block_size=128, base_budget=8)


def both_ms(cost: CostModel, tokens: int, budget: int) -> tuple[float, float]:
    """Dense and sparse attention of one document, forward and backward."""
    row = features([tokens], budget, cost.block_size, cost.work)
    dense, sparse = (
        sum(predict_ms(cost, part, direction, row) for part in parts for direction in Direction)
        for parts in ((Part.DENSE_ATTENTION,), (Part.ATTENTION, Part.ROUTER))
    )
    return dense, sparse


@pytest.mark.parametrize("sparse", [0.05, 0.13, 0.36])
@pytest.mark.parametrize("budget", [4, 32])
def test_times_cross_there(sparse: float, budget: int) -> None:
    efficiency = Efficiency(dense=0.6, sparse=sparse)
    cost = CostModel.analytic(IDENTITY.shape, 128, efficiency=efficiency)
    tokens = crossing_tokens(cost, budget, 1 << 24)
    assert tokens % 128 == 0 and tokens > budget * 128
    dense, sparse_ms = both_ms(cost, tokens, budget)
    assert dense <= sparse_ms
    dense, sparse_ms = both_ms(cost, tokens + 128, budget)
    assert dense > sparse_ms


def test_no_longer_than_the_longest_and_none_where_sparse_attention_is_as_fast() -> None:
    cost = CostModel.analytic(IDENTITY.shape, 128, efficiency=Efficiency(sparse=0.05))
    assert crossing_tokens(cost, 8, 2000) == 2048
    assert crossing_tokens(cost, 8, 1000) == 0
    fast = CostModel.analytic(IDENTITY.shape, 128, efficiency=Efficiency(dense=0.1, sparse=0.7))
    assert crossing_tokens(fast, 8, 1 << 20) == 0


def test_what_is_given_stays_and_the_line_says_what_costs_would_have() -> None:
    cost = CostModel.analytic(IDENTITY.shape, 128)
    found = with_dense_length(CHOICES, cost, 1 << 20)
    assert found.dense_up_to_tokens == crossing_tokens(cost, 8, 1 << 20) > 0
    assert f"up to {found.dense_up_to_tokens:,} tokens are" in dense_length_line(
        found, cost, 1 << 20
    )
    given = replace(CHOICES, dense_up_to="4096")
    assert with_dense_length(given, cost, 1 << 20) is given
    line = dense_length_line(given, cost, 1 << 20)
    assert "up to 4,096 tokens" in line and f"would be {found.dense_up_to_tokens:,} here" in line
    exact = replace(CHOICES, layer_budgets="dense:all")
    assert dense_length_line(exact, cost, 1 << 20).startswith("documents of every length")
    none = dense_length_line(replace(CHOICES, dense_up_to="0"), cost, 1 << 20)
    assert "up to 1,024 tokens are" in none, "the base budget covers them"
    for lists in ("triton", "reference"):
        named = replace(CHOICES, attention=lists)
        assert with_dense_length(named, cost, 1 << 20).dense_up_to == "0"


@pytest.mark.parametrize(
    ("selection", "tokens"), [("token-query-head", 36_864), ("previous-block", 0)]
)
def test_counted_rates_are_those_of_the_kernels_that_run(selection: str, tokens: int) -> None:
    """Torch's own dense attention where the model's own takes no packed sequences, else that; lists
    by token lose to both from some length on, shared lists are faster than torch's at any."""
    layout = Job.even(layers=4, ranks=2, stages=1)
    of_model = HostJob(layout=layout, shape=SHAPE, max_sample_tokens=1 << 20, global_batch_size=8)
    job = replace(of_model, takes_packed_sequences=False)
    config = SparseBalanceConfig(selection=selection)
    with pytest.warns(UserWarning, match="operations counted"):
        cost = job.cost_model(config, {})
        exact = of_model.cost_model(replace(config, layer_budgets="dense:all", tuning="off"), {})
        assert of_model.cost_model(config, {}).ms_per_unit == exact.ms_per_unit
        for changes in ({"dense_attention": "torch"}, {"attention": "blocks"}):
            other = of_model.cost_model(replace(config, **changes), {})
            assert other.ms_per_unit == cost.ms_per_unit
        cuts = of_model.cost_model(replace(config, max_segments=2), {})
    assert cuts.ms_per_unit == exact.ms_per_unit and cost.segments.dense_slowness == 1.0
    assert cuts.segments.dense_slowness == pytest.approx(0.58 / 0.33), "in segments torch's runs"
    assert with_dense_length(config, cost, 1 << 20).dense_up_to_tokens == tokens
    assert crossing_tokens(exact, 32, 1 << 20) > tokens
    assert exact == exact.with_model_attention
    assert exact.ms_per_unit == cost.with_model_attention.ms_per_unit
    assert "dense attention 58%" in exact.source and "dense attention 33%" in cost.source
    for direction in Direction:
        ours, own = (
            each.coefficients_ms(Part.DENSE_ATTENTION, direction)[-1] for each in (cost, exact)
        )
        assert ours / own == pytest.approx(0.58 / 0.33)


SHAPE = ModelShape(
    **{"hidden_size": 2048, "ffn_hidden_size": 11008, "num_attention_heads": 16},
    **{"num_query_groups": 2, "head_dim": 128, "vocab_size": 151936},
    gated_linear_unit=True,
    tensor_parallel_size=1,
)


@pytest.mark.parametrize(
    ("installed", "choices", "counted"),
    [
        (None, {}, "33%"),
        ("4.0.0b36", {}, "60%"),
        ("4.0.0b36", {"dense_attention": "torch"}, "33%"),
        ("4.0.0b36", {"counted_device": "a100"}, "33%"),
        (None, {"dense_attention": "fa4", "counted_device": "b200"}, "60%"),
    ],
)
@pytest.mark.filterwarnings("ignore:no cost table")
def test_flash_attention_4_is_counted_where_it_will_run(
    installed: str | None, choices: Any, counted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then dense attention is no slower than the model's own: with our placement the default, which
    attends to some documents densely, is never slower than dense attention throughout."""
    monkeypatch.setattr(flash_attention, "not_installed", lambda: None if installed else "not")
    cost = configured_cost_model(SparseBalanceConfig(**choices), SHAPE, {})
    assert f"dense attention {counted}" in cost.source
    own = cost.with_model_attention
    assert "dense attention 58%" in own.source
    for direction in Direction:
        ours, models = (
            each.coefficients_ms(Part.DENSE_ATTENTION, direction)[-1] for each in (cost, own)
        )
        assert (ours <= models) == (counted == "60%")


def test_what_a_table_was_measured_with_runs(tmp_path: Path) -> None:
    """Whoever is fastest was measured; another that is named is told of."""
    path = tmp_path / "table.json"
    for kernel in ("torch", "fa4"):
        path.write_text(replace(planted_table(), dense_kernel=kernel).text())
        config = replace(CHOICES, cost_table=str(path), selection="previous-block")
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*has times of")
            cost = configured_cost_model(config, planted_table().identity.shape, {})
        assert with_dense_length(config, cost, 1 << 20).dense_attention == kernel
        assert with_dense_length(config, cost, 1 << 20).attention == "auto"
        other = replace(config, dense_attention={"torch": "fa4", "fa4": "torch"}[kernel])
        with pytest.warns(UserWarning, match=f"has times of {kernel}"):
            configured_cost_model(other, planted_table().identity.shape, {})
    of_lists = replace(cost, list_kernel="fa4")
    for named, runs in (("auto", "fa4"), ("blocks", "blocks")):
        chosen = replace(config, attention=named)
        assert with_dense_length(chosen, of_lists, 1 << 20).attention == runs


@pytest.mark.parametrize("text", ["-1", "many", "1.5", "", "1" * 10])
def test_what_is_no_length(text: str) -> None:
    with pytest.raises(ConfigError, match=r"-dense-up-to .*must be auto, or a num"):
        SparseBalanceConfig(dense_up_to=text)
