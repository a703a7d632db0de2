# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance summary``: runs over the same samples as a table and as JSON."""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsebalance_megatron.cli.output import (
    print_wrapped,
    refuse_output_over_logs,
    write_text,
)
from sparsebalance_megatron.json_file import refuse_same_file
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.text_table import terminal_columns, text_table
from sparsebalance_megatron.view.report import words
from sparsebalance_megatron.view.report.numbers import Numbers, numbers_of
from sparsebalance_megatron.view.report.run_report import picture_of_both

_NOTES_SHOWN = 8


def add_flags(parser: ArgumentParser) -> None:
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
    add_beside(parser)
    parser.add_argument("--all", action="store_true", help="every row of the table")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="also write JSON here")
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else")
    parser.add_argument(
        "--picture", type=Path, metavar="FILE.svg", help="also draw a typical step of both here"
    )


def add_beside(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--beside",
        type=Path,
        nargs="+",
        default=(),
        metavar="DIR",
        help="logs of other runs over the same samples: speedups and a column for each; mode exact "
        "tells what placement gains, fixed budgets (mode placement) what attention does",
    )


def run(arguments: Namespace) -> int:
    if arguments.output is not None and arguments.picture is not None:
        refuse_same_file(arguments.picture, [arguments.output], "--picture")
    for written in (arguments.output, arguments.picture):
        refuse_output_over_logs(
            written, arguments.baseline, arguments.run_directory, *arguments.beside
        )
    baseline, balanced = read_run_log(arguments.baseline), read_run_log(arguments.run_directory)
    numbers = numbers_of(balanced, baseline, arguments.beside)
    text = json.dumps(as_document(numbers), indent=2) + "\n"
    written = []
    if arguments.output is not None:
        write_text(arguments.output, text)
        written.append(f"written to {arguments.output}")
    if arguments.picture is not None:
        iteration, svg = picture_of_both(balanced, baseline)
        write_text(arguments.picture, svg)
        written.append(f"iteration {iteration} of both runs drawn in {arguments.picture}")
    if arguments.json:
        print(text, end="")
        return 0
    print_wrapped(words.descriptions({"baseline": baseline, "run": balanced}))
    show(numbers, numbers.problems, every=arguments.all)
    print(*written, sep="\n", end="\n" if written else "")
    return 0


def as_document(numbers: Numbers) -> dict[str, Any]:
    """Numbers as JSON has them."""
    found = asdict(numbers.comparison or numbers.run)
    if numbers.beside:
        found["beside"] = {
            name: asdict(each.run_over) | {"speedup_over_baseline": each.over_baseline.speedup}
            for name, each in numbers.beside.items()
        }
    return found


def show(numbers: Numbers, notes: Sequence[str], *, every: bool = False) -> None:
    """Print the headline, what it consists of, the table, and what was wrong with the logs."""
    print_wrapped([words.headline(numbers), *words.changes(numbers), *words.caveats(numbers)])
    rows = words.numbers_table(numbers, every=every)
    print(*text_table(rows, columns=terminal_columns()), sep="\n")
    print_wrapped(words.settings_that_differ(numbers))
    shown, left_out = notes[:_NOTES_SHOWN], len(notes) - _NOTES_SHOWN
    shown = [*shown, f"{left_out} more like these"] if left_out > 0 else shown
    print(*(f"note: {note}\n" for note in shown), sep="", end="")
