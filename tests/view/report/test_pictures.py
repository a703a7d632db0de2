# SPDX-License-Identifier: Apache-2.0
"""Timelines against simulator and spans; what a picture shows of waiting, budgets and sharing."""

from dataclasses import replace
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import structs
from record_cases import rank_step, step_record

from sparsebalance_megatron.learn.measurement import MeasuredTimes, Span
from sparsebalance_megatron.log.records import StepRecord
from sparsebalance_megatron.view.report.pictures import (
    COLOURS,
    Timeline,
    measured_timeline,
    step_picture,
)


def times(forward_RPVM: np.ndarray) -> StepRecord:
    """As predicted; backwards take twice as long as forwards."""
    times_2RPVM = np.stack([forward_RPVM, 2 * forward_RPVM])
    schedule_ms, record = np.ones(forward_RPVM.shape[:2]), step_record(1)
    return structs.replace(
        record,
        predicted=replace(record.predicted, times_2RPVM=times_2RPVM),
        measured=MeasuredTimes(times_2RPVM=times_2RPVM, schedule_ms=schedule_ms),
    )


def span(direction: str, start_ms: float, end_ms: float) -> Span:
    return Span(direction, 0, 0, start_ms, end_ms)


CLOCKS_DISAGREE = "the wall clocks of ranks disagree: all are drawn from the step's start"


@pytest.mark.parametrize(
    ("later_s", "shift_ms", "remarks"),
    [(0.002, 2.0, ()), (7200.0, 0.0, (CLOCKS_DISAGREE,)), (-7200.0, 0.0, (CLOCKS_DISAGREE,))],
)
def test_spans_are_set_side_by_side_by_wall_clocks_that_agree(
    later_s: float, shift_ms: float, remarks: tuple[str, ...]
) -> None:
    """One that was set in the middle of a step moves no bar."""
    spans_of_0 = (span("forward", 1.0, 2.0),)
    spans_of_1 = (span("forward", 0.5, 3.0), span("backward", 3.0, 4.0))
    logged = {
        (0, 0): rank_step(start_unix_s=100.0 + later_s, spans=spans_of_0),
        (1, 0): rank_step(start_unix_s=100.0, spans=spans_of_1),
    }
    found = measured_timeline(times(np.ones((2, 1, 1, 1))), logged)
    assert found is not None
    starts = [
        (place, span.direction, span.start_ms, span.end_ms)
        for place, spans in found.spans.items()
        for span in spans
    ]
    moved_ms = pytest.approx((1.0 + shift_ms, 2.0 + shift_ms), abs=1e-3)
    assert starts[0][:2] == ((0, 0), "forward") and starts[0][2:] == moved_ms
    assert starts[1:] == [((1, 0), "forward", 0.5, 3.0), ((1, 0), "backward", 3.0, 4.0)]
    assert found.remarks == remarks


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def bars(axes: Axes, row: int) -> list[tuple[float, float]]:
    """Starts and ends of a row's bars."""
    of_row = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row]
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in of_row]


def view() -> Timeline:
    """Two ranks of two micro-batches, without waiting."""
    spans = [
        Span(way, 0, m, at, at + 1.0)
        for m in (0, 1)
        for at, way in ((2.0 * m, "forward"), (2.0 * m + 1, "backward"))
    ]
    return Timeline(spans={(0, 0): spans, (1, 0): spans}, waiting_share=0.0)


def test_a_step_shows_waiting(figures: list[Figure]) -> None:
    step_picture({"measured": view()})
    (shared,) = (figure.axes[0] for figure in figures)
    assert "4 ms, stages wait 0% of it" in shared.get_title(loc="left")
    for row in (0, 1):
        assert bars(shared, row) == [(0.0, 4.0), (0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
        of_row = shared.patches[5 * row : 5 * row + 5]
        kinds = ("waiting", "forward", "backward", "forward", "backward")
        assert [bar.get_facecolor() for bar in of_row] == [
            matplotlib.colors.to_rgba(COLOURS[kind]) for kind in kinds
        ]


def test_steps_of_very_different_times_have_axes_of_their_own(figures: list[Figure]) -> None:
    long = Timeline(spans={(0, 0): [Span("forward", 0, 0, 0.0, 90.0)]})
    step_picture({"long": long, "short": view()})
    assert [axes.get_xlim()[1] for axes in figures[0].axes] == [90.0, 4.0]


def test_of_many_ranks_some_are_drawn_from_the_fastest_to_the_slowest(
    figures: list[Figure],
) -> None:
    spans = {(rank, 0): [Span("forward", 0, 0, 0.0, 1.0 + rank)] for rank in range(40)}
    _, remarks = step_picture({"measured": Timeline(spans=spans)})
    labels = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert len(labels) == 16 and {"rank 0", "rank 39"} <= set(labels)
    assert any("16 of 40 ranks" in remark for remark in remarks)
