# SPDX-License-Identifier: Apache-2.0
"""What pictures show: parts that add up, and micro-batches that ranks share."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from record_cases import rank_micro_batch, rank_step

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.view.report.numbers import Explanation, TimeSplit
from sparsebalance_megatron.view.report.pictures import (
    step_chart,
    waterfall,
)
from sparsebalance_megatron.view.report.timeline import MEASURED, Timeline

EXPLANATION = Explanation(
    baseline=TimeSplit(steps=9, compute_ms=500.0, waiting_ms=90.0, rest_ms=10.0),
    run=TimeSplit(steps=9, compute_ms=520.0, waiting_ms=20.0, rest_ms=10.0),
    less_attention_ms=-30.0,
    waiting_ms=-70.0,
    rest_ms=0.0,
    machine_ms=50.0,
    speedup_interval=None,
)


def test_other_base_budgets_are_not_told_from_noise() -> None:
    (panel,) = waterfall(replace(EXPLANATION, same_base_budgets=False)).panels
    assert [row.note for row in panel.rows] == ["600", "+20", "-70", "0", "550"]


def test_the_waterfall_leads_from_one_step_to_the_other() -> None:
    chart = waterfall(EXPLANATION)
    (panel,) = chart.panels
    assert [row.note for row in panel.rows] == ["600", "-30", "-70", "0", "+50", "550"]
    spans = [(row.pieces[0].start_ms, row.end_ms) for row in panel.rows[1:-1]]
    assert spans == [(570.0, 600.0), (500.0, 570.0), (500.0, 500.0), (500.0, 550.0)]
    assert [row.end_ms for row in (panel.rows[0], panel.rows[-1])] == [600.0, 550.0]


def view(cp_size: int) -> Timeline:
    """Two ranks share position 1 where ``cp_size`` is 2."""
    spans = [
        Span(way, 0, m, at, at + 1.0)
        for m in (0, 1)
        for at, way in ((2.0 * m, "forward"), (2.0 * m + 1, "backward"))
    ]
    contents = {
        (rank, 0): rank_step(
            *(
                rank_micro_batch(
                    position=position,
                    lengths_tokens=(100, 400),
                    budgets_LS=np.array([[1, 7]]),
                    cp_size=of,
                    rank=rank - rank % of,
                )
                for position, of in enumerate((1, cp_size))
            )
        )
        for rank in (0, 1)
    }
    return Timeline(spans={(0, 0): spans, (1, 0): spans}, source=MEASURED, contents=contents)


def test_a_step_shows_waiting_budgets_and_shared_packed_sequences() -> None:
    (panel,) = step_chart({"measured": view(2)}).panels
    for row in panel.rows:
        kinds = [piece.kind for piece in row.pieces]
        assert kinds == ["waiting", "forward", "computing", "forward", "computing"]
        assert [piece.text for piece in row.pieces] == ["", "", "7", "", "7"]
        assert [piece.marked for piece in row.pieces] == [False, False, False, True, True]
        assert "500 tokens" in row.pieces[1].title and "250 tokens" in row.pieces[3].title
    (narrow,) = step_chart({"measured": view(1)}).panels
    assert not any(piece.marked for row in narrow.rows for piece in row.pieces)


def test_of_many_ranks_some_are_drawn_from_the_fastest_to_the_slowest() -> None:
    spans = {(rank, 0): [Span("forward", 0, 0, 0.0, 1.0 + rank)] for rank in range(40)}
    timeline = Timeline(spans=spans, source=MEASURED)
    chart = step_chart({"measured": timeline})
    labels = [row.label for row in chart.panels[0].rows]
    assert len(labels) == 16 and {"rank 0", "rank 39"} <= set(labels)
    assert any("16 of 40 ranks" in remark for remark in chart.remarks)
