# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run, or of two side by side, as a table of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from sparsebalance_megatron.view.report.comparison import Comparison, RunSummary

if TYPE_CHECKING:
    from rich.table import Table


class Row(NamedTuple):
    """One line of the comparison; ``kind``: where the number comes from."""

    name: str
    kind: Literal["measured", "predicted", "both", "logged"]
    value: Callable[[RunSummary], str]


ROWS = (
    Row("iteration, ms (median)", "measured", lambda run: ms_text(run.iteration_ms_median)),
    Row("mean step, ms", "measured", lambda run: _part(run, "step_ms")),
    Row("  of it computing, ms", "measured", lambda run: _part(run, "compute_ms")),
    Row("  of it waiting, ms", "measured", lambda run: _part(run, "waiting_ms")),
    Row("  of it the rest, ms", "measured", lambda run: _part(run, "rest_ms")),
    Row("imbalance of ranks, max/mean", "measured", lambda run: _text(run.rank_imbalance, ".3f")),
    Row("busiest rank, ms: measured", "measured", lambda run: ms_text(run.measured_ms)),
    Row("busiest rank, ms: predicted", "predicted", lambda run: ms_text(run.predicted_ms)),
    Row("step, ms: predicted lower bound", "predicted", lambda run: ms_text(run.lower_bound_ms)),
    Row("error of predicted rank times", "both", lambda run: _text(run.predicted_error, ".1%")),
    Row(
        "computing, relative to fixed budgets",
        "predicted",
        lambda run: _text(run.work_ratio, ".1%"),
    ),
    Row("score coverage (mean)", "measured", lambda run: _text(run.coverage_mean, ".4f")),
    Row("loss, first step", "measured", lambda run: _text(run.loss_first, ".4f")),
    Row("loss, last step", "measured", lambda run: _text(run.loss_last, ".4f")),
    Row("steps, of them warm-up", "logged", lambda run: f"{run.steps}, {run.warm_up_steps}"),
)


def table_of(columns: Mapping[str, RunSummary]) -> Table:
    """A column per run."""
    from rich.table import Table

    table = Table()
    table.add_column("")
    for name in columns:
        table.add_column(name, justify="right")
    for row in ROWS:
        table.add_row(row.name, *(row.value(run) for run in columns.values()))
    return table


def ms_text(value: float | None) -> str:
    """A time without its unit. Relative times can be far below a millisecond."""
    if value is not None and value >= 100.0:
        return _text(value, ",.0f")
    return _text(value, ".1f" if value is None or value >= 1.0 else ".3g")


def _part(run: RunSummary, name: str) -> str:
    """A part of the mean step's time, in ms."""
    return ms_text(None if run.split is None else getattr(run.split, name))


def _text(value: float | None, layout: str) -> str:
    return "not measured" if value is None else format(value, layout)


def columns_of(numbers: RunSummary | Comparison) -> dict[str, RunSummary]:
    """The runs by what they are called."""
    if isinstance(numbers, Comparison):
        return {"baseline": numbers.baseline, "sparse balance": numbers.sparse_balance}
    return {"this run": numbers}
