# SPDX-License-Identifier: Apache-2.0
"""A fit recovers what was planted, predicts measured latencies, and says where it is doubtful."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from cost.cost_cases import predict_ms

from sparsebalance_megatron.cost.fit import doubts, fit_cost_model, fit_errors, held_out_errors
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import CostRow, CostTable, CostTableError
from sparsebalance_megatron.cost.work_model import FEATURES, features

Measure = Callable[..., CostTable]
SHARED = Path(__file__).parents[2].parent / "shared"


def test_fit_recovers_planted_coefficients(measure: Measure, planted: CostModel) -> None:
    fitted = fit_cost_model(measure())
    for direction in Direction:
        for part in (part for part in Part if part is not Part.EXPERTS):
            np.testing.assert_allclose(
                fitted.coefficients_ms(part, direction),
                planted.coefficients_ms(part, direction),
                rtol=1e-5,  # of which rounding to six digits takes half
                atol=1e-12,
                err_msg=f"{part} {direction}",
            )


def test_fit_error_is_that_of_the_noise(measure: Measure) -> None:
    table = measure(noise=0.05)
    errors = fit_errors(fit_cost_model(table), table)
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
    rows[index] = msgspec.structs.replace(rows[index], ms_median=rows[index].ms_median * 1.5)
    bent = replace(clean, rows=tuple(rows))
    key = (Part.HEAD, rows[index].direction)
    hidden = fit_errors(fit_cost_model(bent), bent)[key].p95
    assert held_out_errors(bent)[key].p95 > hidden
    assert held_out_errors(bent)[key].rows == fit_errors(fit_cost_model(bent), bent)[key].rows


def test_fit_weighs_small_and_large_alike(measure: Measure, planted: CostModel) -> None:
    table = measure(noise=0.05)
    fitted = fit_cost_model(table)
    for lengths in ([256], [16384]):
        row = features(lengths, 16, table.identity.block_size, fitted.work)
        predicted = predict_ms(fitted, Part.ATTENTION, Direction.FORWARD, row)
        true = predict_ms(planted, Part.ATTENTION, Direction.FORWARD, row)
        assert predicted == pytest.approx(true, rel=0.1)


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
    fitted = fit_cost_model(measure(noise=0.5))
    assert fitted.coefficients_ms(part, Direction.FORWARD)[FEATURES.index(without)] == 0.0


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
    fitted = fit_cost_model(table)
    for tokens, ms in latencies[held_out::2]:
        row = features([tokens], np.inf, table.identity.block_size, fitted.work)
        predicted_ms = predict_ms(fitted, Part.ATTENTION, Direction.FORWARD, row)
        assert predicted_ms == pytest.approx(ms, rel=0.1), f"{tokens} tokens"


def test_a_table_that_cannot_be_fitted_is_named(
    measure: Measure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gives_up(*_: object) -> None:
        raise RuntimeError("too many iterations")

    monkeypatch.setattr("scipy.optimize.nnls", gives_up)
    with pytest.raises(CostTableError, match=r"cannot be fitted \(too many iterations\)"):
        fit_cost_model(measure())


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_measured_table_raises_no_doubt(measure: Measure, noise: float) -> None:
    table = measure(noise)
    assert doubts(table, fit_cost_model(table)) == ()


def test_one_size_only(measure: Measure) -> None:
    table = measure()
    lengths = table.rows[0].lengths_tokens
    table = replace(table, rows=tuple(r for r in table.rows if r.lengths_tokens == lengths))
    (doubt,) = doubts(table, fit_cost_model(table))
    assert "measured at one size only" in doubt
    assert "attention forward, router forward" in doubt


def test_times_that_fall_where_the_work_grows(measure: Measure) -> None:
    table = measure()
    rows = tuple(msgspec.structs.replace(row, ms_median=1.0 / row.ms_median) for row in table.rows)
    table = replace(table, rows=rows, path="fallen.json")
    (doubt,) = doubts(table, fit_cost_model(table))
    assert doubt.startswith("cost table fallen.json: times do not grow as work does")
