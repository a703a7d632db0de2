# SPDX-License-Identifier: Apache-2.0
"""What pictures show: bars that add up, micro-batches that ranks share, curves of layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from msgspec import structs
from record_cases import header_of, rank_micro_batch, rank_step
from step_cases import JOB

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.log.records import CoverageRecord
from sparsebalance_megatron.view.report import pictures
from sparsebalance_megatron.view.report.numbers import Change, Explanation, TimeSplit
from sparsebalance_megatron.view.report.pictures import (
    COLOURS,
    coverage_picture,
    layers_picture,
    step_picture,
    waterfall,
)
from sparsebalance_megatron.view.report.timeline import MEASURED, Timeline

CHANGES = (("less attention", -30.0), ("less waiting", -70.0), ("rest", 0.0), ("noise", 50.0))
EXPLANATION = Explanation(
    baseline=TimeSplit(steps=9, compute_ms=500.0, waiting_ms=90.0, rest_ms=10.0),
    run=TimeSplit(steps=9, compute_ms=520.0, waiting_ms=20.0, rest_ms=10.0),
    changes=tuple(Change(*each) for each in CHANGES),
    speedup_interval=None,
)


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn."""
    drawn: list[Figure] = []
    render = pictures._drawn

    def keep(draw: Callable[[Figure], None], *size: float) -> str:
        def draw_and_keep(figure: Figure) -> None:
            draw(figure)
            drawn.append(figure)

        return render(draw_and_keep, *size)

    monkeypatch.setattr(pictures, "_drawn", keep)
    return drawn


def bars(axes: Axes, row: int) -> list[tuple[float, float]]:
    """Starts and ends of a row's bars."""
    of_row = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row]
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in of_row]


def texts(axes: Axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


def test_the_waterfall_leads_from_one_step_to_the_other(figures: list[Figure]) -> None:
    assert waterfall(EXPLANATION).svg.startswith("<svg")
    (axes,) = figures[0].axes
    assert texts(axes) == ["600", "-30", "-70", "0", "+50", "550"]
    spans = [bars(axes, row) for row in range(1, 5)]
    assert spans == [[(570.0, 600.0)], [(500.0, 570.0)], [(500.0, 500.0)], [(500.0, 550.0)]]
    assert [bars(axes, row)[-1][1] for row in (0, 5)] == [600.0, 550.0]


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


def test_a_step_shows_waiting_budgets_and_shared_packed_sequences(figures: list[Figure]) -> None:
    step_picture({"measured": view(2)})
    step_picture({"measured": view(1)})
    shared, narrow = (figure.axes[0] for figure in figures)
    assert "4 ms, stages wait 0% of it" in shared.get_title(loc="left")
    ink = matplotlib.colors.to_rgba("#1b1d20")
    for row in (0, 1):
        assert bars(shared, row) == [(0.0, 4.0), (0.0, 1.0), (1.0, 2.0), (2.0, 3.0), (3.0, 4.0)]
        of_row = shared.patches[5 * row : 5 * row + 5]
        kinds = ("waiting", "forward", "backward", "forward", "backward")
        assert [bar.get_facecolor() for bar in of_row] == [
            matplotlib.colors.to_rgba(COLOURS[kind]) for kind in kinds
        ]
        assert [bar.get_edgecolor() == ink for bar in of_row[1:]] == [False, False, True, True]
    assert texts(shared) == ["7"] * 4
    assert not any(bar.get_edgecolor() == ink for bar in narrow.patches)


def test_steps_of_very_different_times_have_axes_of_their_own(figures: list[Figure]) -> None:
    long = Timeline(spans={(0, 0): [Span("forward", 0, 0, 0.0, 90.0)]}, source=MEASURED)
    picture = step_picture({"long": long, "short": view(1)})
    assert [axes.get_xlim()[1] for axes in figures[0].axes] == [90.0, 4.0]
    assert any("axis of its own" in remark for remark in picture.remarks)


def test_of_many_ranks_some_are_drawn_from_the_fastest_to_the_slowest(
    figures: list[Figure],
) -> None:
    spans = {(rank, 0): [Span("forward", 0, 0, 0.0, 1.0 + rank)] for rank in range(40)}
    picture = step_picture({"measured": Timeline(spans=spans, source=MEASURED)})
    labels = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert len(labels) == 16 and {"rank 0", "rank 39"} <= set(labels)
    assert any("16 of 40 ranks" in remark for remark in picture.remarks)


def test_coverage_of_the_layers(figures: list[Figure]) -> None:
    curves_LUK = np.full((2, 3, 3), np.nan)
    curves_LUK[:, 2] = (0.2, 0.4, 0.8), (0.4, 0.6, 1.0)
    record = CoverageRecord(
        iteration=5, grid=(1, 2, 4), bucket_blocks=(1, 3, 4), curves_LUK=curves_LUK
    )
    assert coverage_picture(record, {"base_budget": 2}) is not None
    assert coverage_picture(record, {}) is not None
    assert coverage_picture(None, {}) is None
    (axes,), (bare,) = (figure.axes for figure in figures)
    assert axes.get_title(loc="left") == "4 blocks"
    mean, base = axes.lines
    np.testing.assert_allclose(mean.get_xydata(), [(1, 0.3), (2, 0.5), (4, 0.9)])
    assert set(base.get_xdata()) == {2}
    band = axes.collections[0].get_datalim(axes.transData)
    assert (band.ymin, band.ymax) == pytest.approx((0.2, 1.0))
    assert len(bare.lines) == 1


def test_base_budgets_of_layers(figures: list[Figure]) -> None:
    config = {"base_budget": 8, "layer_budgets": "dense:0 2:1"}
    header = structs.replace(header_of(replace(JOB, stage_layers=(((0, 1, 2),),))), config=config)
    assert layers_picture(header) is not None
    (axes,) = figures[0].axes
    dense, *others = (bar.get_height() for bar in axes.patches)
    assert others == [2, 8] and dense > 8
    for alike in (None, "dense:all"):
        assert (
            layers_picture(structs.replace(header, config=config | {"layer_budgets": alike}))
            is None
        )
    assert layers_picture(None) is None
