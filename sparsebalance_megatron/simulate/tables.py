# SPDX-License-Identifier: Apache-2.0
"""Planned variants as a table of at most 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from sparsebalance_megatron.simulate.variants import Outcome

if TYPE_CHECKING:
    from rich.console import Console


def as_json(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """One entry per variant, of plain Python types."""
    return {name: asdict(outcome) for name, outcome in outcomes.items()}


def show(
    console: Console,
    title: str,
    outcomes: Mapping[str, Outcome],
    published: Mapping[str, tuple[float | None, float]] | None = None,
) -> None:
    """Print one row per variant; ``published``: (micro-batch imbalance, speedup) of the paper."""
    from rich import box
    from rich.table import Table

    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False
    )
    table.add_column("", no_wrap=True)
    columns = ["step\nms", "speed\nup", "bound\nratio", "slot\nimbal", "rank\nimbal"]
    columns += ["cover\nage", "work\nratio", "plan\nms"]
    if published is not None:
        columns[2:2] = ["in\npaper"]
        columns[5:5] = ["in\npaper"]
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for name, outcome in outcomes.items():
        cells = _cells(outcome)
        if published is not None:
            imbalance, speedup = published.get(name, (None, None))
            cells[2:2] = [_text(speedup, ".2f")]
            cells[5:5] = [_text(imbalance, ".2f")]
        table.add_row(name, *cells)
    console.print(table)
    for name, meaning in _LEGEND.items():
        console.print(f"{name}: {meaning}", markup=False, highlight=False)


_LEGEND = {
    "speedup": "total time of the baseline over that of the row",
    "bound ratio": "step time over the least that any placement and allowed budgets could take",
    "imbal": "largest over mean time, of slots (micro-batches) and of ranks",
    "work ratio": "predicted work over that at base budgets: below 1 attention was cut",
    "base coverage": "the fastest step whose mean coverage is not below the base budgets'",
}


def _cells(outcome: Outcome) -> list[str]:
    return [
        format(outcome.makespan_ms, ".0f" if outcome.makespan_ms >= 100 else ".3g"),
        f"{outcome.speedup:.2f}",
        f"{outcome.bound_ratio:.2f}",
        f"{outcome.imbalance_microbatch:.2f}",
        f"{outcome.imbalance_rank:.2f}",
        _text(outcome.coverage_mean, ".3f"),
        f"{outcome.work_ratio:.2f}",
        f"{outcome.plan_ms:.1f}",
    ]


def _text(value: float | None, layout: str) -> str:
    return "-" if value is None else format(value, layout)
