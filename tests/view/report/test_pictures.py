# SPDX-License-Identifier: Apache-2.0
"""What the picture of a step shows: waiting, budgets, micro-batches that ranks share."""

from __future__ import annotations

from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from record_cases import rank_micro_batch, rank_step

from sparsebalance_megatron.learn.measurement import Span
from sparsebalance_megatron.view.report.pictures import (
    COLOURS,
    step_picture,
)
from sparsebalance_megatron.view.report.timeline import Timeline


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


def texts(axes: Axes) -> list[str]:
    return [text.get_text().strip() for text in axes.texts]


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
    return Timeline(spans={(0, 0): spans, (1, 0): spans}, contents=contents)


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
    long = Timeline(spans={(0, 0): [Span("forward", 0, 0, 0.0, 90.0)]})
    step_picture({"long": long, "short": view(1)})
    assert [axes.get_xlim()[1] for axes in figures[0].axes] == [90.0, 4.0]


def test_of_many_ranks_some_are_drawn_from_the_fastest_to_the_slowest(
    figures: list[Figure],
) -> None:
    spans = {(rank, 0): [Span("forward", 0, 0, 0.0, 1.0 + rank)] for rank in range(40)}
    picture = step_picture({"measured": Timeline(spans=spans)})
    labels = [label.get_text() for label in figures[0].axes[0].get_yticklabels()]
    assert len(labels) == 16 and {"rank 0", "rank 39"} <= set(labels)
    assert any("16 of 40 ranks" in remark for remark in picture.remarks)
