# SPDX-License-Identifier: Apache-2.0
"""The fitted model recovers what was planted and behaves as an affine, monotone cost must."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cost.cost_cases import predict_ms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import cost as oracle

from sparsebalance_megatron.cost.features import FEATURES, features
from sparsebalance_megatron.cost.model import (
    CostModel,
    Direction,
    Part,
    fit_errors,
    held_out_errors,
)
from sparsebalance_megatron.cost.table import CostRow, CostTable, CostTableError, RunIdentity
from sparsebalance_megatron.cost.work_model import work_model_named

Measure = Callable[..., CostTable]
SHARED = Path(__file__).parents[2].parent / "shared"

DOCUMENTS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 6)), min_size=1, max_size=4)
same_planted_model = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def test_fit_recovers_planted_coefficients(measure: Measure, planted: CostModel) -> None:
    fitted = CostModel.fit(measure())
    for direction in Direction:
        for part in Part:
            np.testing.assert_allclose(
                fitted.coefficients_ms(part, direction),
                planted.coefficients_ms(part, direction),
                rtol=1e-5,  # of which rounding to six digits takes half
                atol=1e-12,
                err_msg=f"{part} {direction}",
            )


def test_fit_error_is_that_of_the_noise(measure: Measure) -> None:
    table = measure(noise=0.05)
    errors = fit_errors(CostModel.fit(table), table)
    assert set(errors) == {(row.part, row.direction) for row in table.rows}
    attention = errors[Part.ATTENTION, Direction.FORWARD]
    assert attention.rows == 32
    assert 0.01 < attention.median < 0.05
    assert attention.median <= attention.p95 < 0.2


def test_held_out_error_is_zero_without_noise_and_sees_what_a_fit_hides(measure: Measure) -> None:
    clean = measure()
    assert all(error.p95 < 1e-4 for error in held_out_errors(clean).values())
    rows = list(clean.rows)
    index = next(i for i, row in enumerate(rows) if row.part is Part.HEAD)
    rows[index] = replace(rows[index], ms_median=rows[index].ms_median * 1.5)
    bent = replace(clean, rows=tuple(rows))
    key = (Part.HEAD, rows[index].direction)
    hidden = fit_errors(CostModel.fit(bent), bent)[key].p95
    assert held_out_errors(bent)[key].p95 > hidden
    assert held_out_errors(bent)[key].rows == fit_errors(CostModel.fit(bent), bent)[key].rows


def test_fit_weighs_small_and_large_alike(measure: Measure, planted: CostModel) -> None:
    table = measure(noise=0.05)
    fitted = CostModel.fit(table)
    for lengths in ([256], [16384]):
        row = features(lengths, 16, table.identity.block_size, fitted.work)
        predicted = predict_ms(fitted, Part.ATTENTION, Direction.FORWARD, row)
        true = predict_ms(planted, Part.ATTENTION, Direction.FORWARD, row)
        assert predicted == pytest.approx(true, rel=0.1)


def test_fit_never_returns_negative_costs(measure: Measure) -> None:
    fitted = CostModel.fit(measure(noise=0.8))
    for direction in Direction:
        for part in Part:
            assert (fitted.coefficients_ms(part, direction) >= 0.0).all()


@pytest.mark.parametrize(
    ("part", "without"),
    [
        (Part.ATTENTION, "visible_block_pairs"),
        (Part.ROUTER, "block_pairs"),
        (Part.LINEAR, "block_pairs"),
        (Part.HEAD, "visible_block_pairs"),
    ],
)
def test_a_kind_depends_only_on_its_features(measure: Measure, part: Part, without: str) -> None:
    fitted = CostModel.fit(measure(noise=0.5))
    assert fitted.coefficients_ms(part, Direction.FORWARD)[FEATURES.index(without)] == 0.0


@same_planted_model
@given(documents=DOCUMENTS)
def test_prediction_equals_the_oracles_sum(
    planted: CostModel, documents: list[tuple[int, int]]
) -> None:
    lengths, budgets = (list(column) for column in zip(*documents, strict=True))
    row = features(lengths, budgets, planted.block_size, planted.work)
    for part in Part:
        expected = oracle.micro_batch_ms(
            lengths, budgets, planted.block_size, planted.forward_ms[part]
        )
        assert predict_ms(planted, part, Direction.FORWARD, row) == pytest.approx(
            expected, rel=1e-9
        )


def test_recompute_adds_the_forward_it_repeats(planted: CostModel) -> None:
    for full, attention_only, attention_kept, repeated in (
        (False, False, False, set()),
        (True, False, False, {Part.ATTENTION, Part.ROUTER, Part.LINEAR}),
        (False, True, False, {Part.ATTENTION, Part.ROUTER}),
        (False, False, True, set()),
        (True, False, True, {Part.LINEAR}),
        (False, True, True, set()),
    ):
        model = planted.with_recompute(
            full=full, attention_only=attention_only, attention_kept=attention_kept
        )
        assert model.forward_ms == planted.forward_ms
        for part in Part:
            expected = planted.coefficients_ms(part, Direction.BACKWARD)
            if part in repeated:
                expected = expected + planted.coefficients_ms(part, Direction.FORWARD)
            np.testing.assert_array_equal(model.coefficients_ms(part, Direction.BACKWARD), expected)


@pytest.mark.parametrize("bad", [(1.0,) * 4, (-1.0, 0, 0, 0, 0), (math.nan, 0, 0, 0, 0)])
def test_a_model_refuses_impossible_costs(planted: CostModel, bad: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="cost model: head forward is"):
        replace(planted, forward_ms={**planted.forward_ms, Part.HEAD: bad})


def test_frozen_weights_leave_one_product_of_two(identity: RunIdentity) -> None:
    """Counted by hand: a projection's backward is as long as its forward, attention as before."""
    model = CostModel.analytic(identity.shape, 64)
    frozen = model.with_frozen_weights()
    assert frozen.forward_ms == model.forward_ms
    for part in (Part.LINEAR, Part.HEAD):
        assert frozen.backward_ms[part] == model.forward_ms[part]
    assert not any(frozen.backward_ms[Part.EMBEDDING])
    for part in (Part.ATTENTION, Part.ROUTER):
        assert frozen.backward_ms[part] == model.backward_ms[part]
    recomputed = frozen.with_recompute(full=True, attention_only=False)
    assert recomputed.backward_ms[Part.LINEAR] == tuple(
        2 * value for value in model.forward_ms[Part.LINEAR]
    )


def test_counted_operations_of_a_layer(identity: RunIdentity) -> None:
    """2 operations per weight and token; 4 T^2 H D for dense attention over whole blocks."""
    shape = identity.shape
    model = CostModel.analytic(shape, 128, flops_per_ms=1.0)
    row = features([1024], np.inf, 128, model.work)
    weights = 256 * (8 + 2 + 2) * 32 + 8 * 32 * 256 + 3 * 256 * 688
    assert predict_ms(model, Part.LINEAR, Direction.FORWARD, row) == 2 * 1024 * weights
    assert predict_ms(model, Part.HEAD, Direction.FORWARD, row) == 2 * 1024 * 256 * 1024
    causal_pairs = 8 * 9 / 2 * 128**2
    attention = predict_ms(model, Part.ATTENTION, Direction.FORWARD, row)
    assert attention == pytest.approx(4 * causal_pairs * 8 * 32)
    assert predict_ms(model, Part.ATTENTION, Direction.BACKWARD, row) == 2.5 * attention
    assert predict_ms(model, Part.ROUTER, Direction.BACKWARD, row) == 0.0


def test_counted_operations_shrink_with_tensor_parallelism(identity: RunIdentity) -> None:
    row = features([4096], 4, 128, work_model_named("previous-block"))
    whole = CostModel.analytic(identity.shape, 128)
    half = CostModel.analytic(replace(identity.shape, tensor_parallel_size=2), 128)
    for part in (Part.ATTENTION, Part.ROUTER, Part.LINEAR, Part.HEAD):
        for direction in Direction:
            assert predict_ms(half, part, direction, row) == pytest.approx(
                predict_ms(whole, part, direction, row) / 2
            )


def test_token_selection_costs_more_routing(identity: RunIdentity) -> None:
    row = features([4096], 4, 128, work_model_named("previous-block"))
    per_block, per_token, per_head = (
        predict_ms(
            CostModel.analytic(identity.shape, 128, selection=selection),
            *(Part.ROUTER, Direction.FORWARD, row),
        )
        for selection in ("previous-block", "token-kv-head", "token-query-head")
    )
    assert per_block < per_token < per_head


def _h100_latencies() -> list[tuple[int, float]]:
    path = SHARED / "data" / "h100_attention_latency.csv"
    if not path.exists():
        pytest.skip(f"reference latencies are absent: {path}")
    with path.open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["cp"] == row["tp"] == "1"]
    return [(int(row["L"]), float(row["duration_per_doc"])) for row in rows]


@pytest.mark.parametrize("held_out", [0, 1])
def test_dense_h100_latencies_are_predicted_within_a_tenth(measure: Measure, held_out: int) -> None:
    """Every other length fitted, the rest predicted."""
    latencies = [(tokens, ms) for tokens, ms in _h100_latencies() if tokens >= 2048]
    others = [row for row in measure().rows if row.part is not Part.ATTENTION]
    attention = [
        CostRow(
            part=Part.ATTENTION,
            direction=direction,
            lengths_tokens=(tokens,),
            budget_blocks=None,
            ms_median=ms,
            ms_spread=0.0,
            repeats=1,
        )
        for direction in Direction
        for index, (tokens, ms) in enumerate(latencies)
        if index % 2 != held_out
    ]
    table = replace(measure(), rows=(*others, *attention))
    fitted = CostModel.fit(table)
    for tokens, ms in latencies[held_out::2]:
        row = features([tokens], np.inf, table.identity.block_size, fitted.work)
        predicted_ms = predict_ms(fitted, Part.ATTENTION, Direction.FORWARD, row)
        assert predicted_ms == pytest.approx(ms, rel=0.1), f"{tokens} tokens"


def test_a_table_that_cannot_be_fitted_is_named(
    measure: Callable[..., CostTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gives_up(*_: object) -> None:
        raise RuntimeError("too many iterations")

    monkeypatch.setattr("scipy.optimize.nnls", gives_up)
    with pytest.raises(CostTableError, match=r"cannot be fitted \(too many iterations\)"):
        CostModel.fit(measure())
