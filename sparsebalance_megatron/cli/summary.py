# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance summary``: two runs over the same samples as a table and as JSON."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from sparsebalance_megatron.cli.output import (
    check_outputs,
    print_notes,
    print_wrapped,
    refuse_output_over_logs,
    write_text,
)
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.text_table import terminal_columns, text_table
from sparsebalance_megatron.view.report.numbers import Comparison, RunSummary, compare
from sparsebalance_megatron.view.report.run_report import step_picture
from sparsebalance_megatron.view.report.words import (
    caveats,
    changes,
    headline,
    numbers_table,
    settings_that_differ,
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``summary``."""
    parser.description = "Compare two runs by their step logs (--sparse-balance-log-dir)."
    parser.add_argument(
        "--baseline", type=Path, required=True, metavar="DIR", help="logs to compare with"
    )
    parser.add_argument(
        "--run",
        type=Path,
        required=True,
        metavar="DIR",
        dest="run_directory",
        help="logs of the run over the same samples",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write JSON here")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help="also draw a typical step of both here"
    )


def run(arguments: Namespace) -> int:
    """Read both logs, write the JSON, print the table, draw."""
    check_outputs(
        {
            "--output": (arguments.output, (".json",)),
            "--picture": (arguments.picture, (".svg",)),
        }
    )
    for written in (arguments.output, arguments.picture):
        refuse_output_over_logs(written, arguments.baseline, arguments.run_directory)
    baseline, balanced = read_run_log(arguments.baseline), read_run_log(arguments.run_directory)
    comparison = compare(baseline, balanced)
    text = json.dumps(asdict(comparison), indent=2) + "\n"
    written = []
    if arguments.output is not None:
        write_text(arguments.output, text)
        written.append(f"written to {arguments.output}")
    if arguments.picture is not None:
        iteration, svg = step_picture(balanced, baseline)
        write_text(arguments.picture, svg)
        written.append(f"iteration {iteration} of both runs drawn in {arguments.picture}")
    if arguments.json:
        print(text, end="")
        return 0
    show(comparison, comparison.problems)
    print(*written, sep="\n", end="\n" if written else "")
    return 0


def show(numbers: RunSummary | Comparison, notes: Sequence[str]) -> None:
    """Print the headline, what it consists of, the table, and what was wrong with the logs."""
    print_wrapped(settings_that_differ(numbers))
    print_wrapped([headline(numbers), *changes(numbers), *caveats(numbers)])
    # The page says besides how each number is known.
    names, rows = numbers_table(numbers)
    cells = [dict(zip(names[:-1], row[:-1], strict=True)) for row in rows]
    print(*text_table(cells, columns=terminal_columns()), sep="\n")
    print_notes(notes)
