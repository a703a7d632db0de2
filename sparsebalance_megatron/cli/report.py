# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance report``: a run's logs as one HTML file, and in short on the terminal."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from sparsebalance_megatron.cli.output import open_console, print_notes, write_text
from sparsebalance_megatron.cli.summary import show
from sparsebalance_megatron.report.comparison import Comparison
from sparsebalance_megatron.report.comparison_table import columns_of, table_of
from sparsebalance_megatron.report.page import render
from sparsebalance_megatron.report.run_report import make_report
from sparsebalance_megatron.report.sentences import headline


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``report``."""
    parser.description = (
        "Read what a run wrote into --sparse-balance-log-dir and show it as one HTML "
        "page that needs nothing beside itself."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--baseline", type=Path, metavar="RUN_DIR", help="compare with this run of the same samples"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="ITERATION",
        help="draw this step; default: one of median speedup, or of median time",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="default: report.html",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the page's numbers as JSON, and nothing else"
    )


def run(arguments: Namespace) -> int:
    """Read, draw, write, print.

    Raises:
        RunLogError: if a directory holds no readable log.
        ReportError: if matplotlib is not installed, or the step is not logged.
        OutputError: if the page cannot be written, or rich is not installed; the page is written
            by then.
    """
    report = make_report(arguments.run_directory, arguments.baseline, arguments.step)
    write_text(arguments.output, render(report.page))
    if arguments.json:
        print(json.dumps(asdict(report.numbers), indent=2))
        return 0
    if isinstance(report.numbers, Comparison):
        show(report.numbers)
    else:
        console = open_console()
        console.print(headline(report.numbers), markup=False, highlight=False)
        console.print(table_of(columns_of(report.numbers)))
        print_notes(report.page.notes)
    for line in report.not_drawn:
        print(line)
    print(f"iteration {report.iteration} is drawn; written to {arguments.output}")
    return 0
