# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance summary``: two runs over the same samples as a table and as JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sparsebalance_megatron.report.comparison import Comparison, RunSummary, compare
from sparsebalance_megatron.report.picture import draw_step
from sparsebalance_megatron.telemetry.step_log import read_run_log

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_NOTES_SHOWN = 8


class SummaryError(ValueError):
    """A comparison cannot be made or shown."""


def add_parser(subparsers: Any) -> None:
    """Add ``summary`` to the subcommands of ``sparse-balance``."""
    parser: ArgumentParser = subparsers.add_parser(
        "summary",
        help="compare a run with its baseline",
        description="Compare two runs by their step logs (--sparse-balance-log-dir).",
    )
    parser.add_argument("--baseline", type=Path, required=True, metavar="DIR")
    parser.add_argument("--run", type=Path, required=True, metavar="DIR", dest="run_directory")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write JSON here")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help="also draw a typical step of both here"
    )


def run(arguments: Namespace) -> int:
    """Read both logs, write the JSON, print the table.

    Raises:
        RunLogError: if a run left no usable log.
        SummaryError: if rich is not installed.
        PictureError: if no step can be drawn.
    """
    baseline, balanced = read_run_log(arguments.baseline), read_run_log(arguments.run_directory)
    comparison = compare(baseline, balanced)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(
            json.dumps(asdict(comparison), indent=2) + "\n", encoding="utf-8"
        )
    show(comparison)
    if arguments.output is not None:
        print(f"written to {arguments.output}")
    if arguments.picture is not None:
        iteration = draw_step(baseline, balanced, arguments.picture)
        print(f"iteration {iteration} of both runs drawn in {arguments.picture}")
    return 0


def show(comparison: Comparison, console: Console | None = None) -> None:
    """Print the table, the speedups, and what was wrong with the logs."""
    console = console or _console()
    console.print(
        _table({"baseline": comparison.baseline, "sparse balance": comparison.sparse_balance})
    )
    console.print(
        f"speedup {_text(comparison.speedup, '.3f')} (ratio of medians), "
        f"{_text(comparison.speedup_total, '.3f')} (total time), "
        f"{_text(comparison.speedup_paired, '.3f')} (median step)"
    )
    show_notes(comparison.problems, console)


def show_run(run: RunSummary, console: Console | None = None) -> None:
    """Print one run's numbers."""
    (console or _console()).print(_table({"this run": run}))


def show_notes(notes: Sequence[str], console: Console | None = None) -> None:
    """Print the first few, and how many more there are."""
    console = console or _console()
    for note in notes[:_NOTES_SHOWN]:
        console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
    hidden = len(notes) - _NOTES_SHOWN
    if hidden > 0:
        console.print(f"note: {hidden} more like these")


def _console() -> Console:
    try:
        from rich.console import Console
    except ImportError:
        raise SummaryError(
            "the table needs rich: pip install 'sparsebalance-megatron[tools]'"
        ) from None
    return Console()


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


def _table(columns: Mapping[str, RunSummary]) -> Table:
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
