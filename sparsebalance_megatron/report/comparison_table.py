# SPDX-License-Identifier: Apache-2.0
"""The numbers of one run, or of two side by side, as a table of the terminal."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal, NamedTuple

from sparsebalance_megatron.report.comparison import Comparison, RunSummary

if TYPE_CHECKING:
    from rich.table import Table


class Row(NamedTuple):
    """One line of the comparison; ``kind``: where the number comes from."""

    name: str
    kind: Literal["measured", "predicted", "both", "logged"]
    value: Callable[[RunSummary], str]


ROWS = (
    Row("iteration, ms (median)", "measured", lambda run: _ms(run.iteration_ms_median)),
    Row("imbalance of ranks, max/mean", "measured", lambda run: _text(run.rank_imbalance, ".3f")),
    Row("busiest rank, ms: measured", "measured", lambda run: _ms(run.measured_ms)),
    Row("busiest rank, ms: predicted", "predicted", lambda run: _ms(run.predicted_ms)),
    Row("step, ms: predicted lower bound", "predicted", lambda run: _ms(run.lower_bound_ms)),
    Row("error of predicted rank times", "both", lambda run: _text(run.predicted_error, ".1%")),
    Row("work, of that at base budgets", "predicted", lambda run: _text(run.work_ratio, ".1%")),
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


def _ms(value: float | None) -> str:
    """Counted operations predict relative times, which can be far below a millisecond."""
    return _text(value, ".1f" if value is None or value >= 1.0 else ".3g")


def _text(value: float | None, layout: str) -> str:
    return "not measured" if value is None else format(value, layout)


def columns_of(numbers: RunSummary | Comparison) -> dict[str, RunSummary]:
    """The runs by what they are called."""
    if isinstance(numbers, Comparison):
        return {"baseline": numbers.baseline, "sparse balance": numbers.sparse_balance}
    return {"this run": numbers}


def speedups_of(comparison: Comparison) -> str:
    """The speedups in words."""
    return (
        f"speedup {_text(comparison.speedup, '.3f')} (ratio of medians), "
        f"{_text(comparison.speedup_total, '.3f')} (total time), "
        f"{_text(comparison.speedup_paired, '.3f')} (median step)"
    )
