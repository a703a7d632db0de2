# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance report``: a run's logs as one HTML file, and in short on the terminal."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import asdict
from pathlib import Path

from sparsebalance_megatron.cli.output import (
    print_json,
    refuse_output_over_logs,
    write_text,
)
from sparsebalance_megatron.cli.summary import show
from sparsebalance_megatron.view.report.run_report import make_report, render_page


def add_flags(parser: ArgumentParser) -> None:
    parser.description = (
        "Read what a run wrote into --sparse-balance-log-dir and show it as one HTML "
        "page that needs no other file."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR")
    parser.add_argument(
        "--baseline", type=Path, metavar="RUN_DIR", help="compare with this run of the same samples"
    )
    parser.add_argument(
        "--step",
        type=int,
        metavar="ITERATION",
        help="draw this step; default: the nearest to the mean step of both runs",
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
    refuse_output_over_logs(arguments.output, arguments.run_directory, arguments.baseline)
    report = make_report(arguments.run_directory, arguments.baseline, arguments.step)
    write_text(arguments.output, render_page(report))
    if arguments.json:
        print_json(asdict(report.numbers))
        return 0
    show(report.numbers, report.notes)
    print(
        *report.missing,
        f"iteration {report.iteration} is drawn; written to {arguments.output}",
        sep="\n",
    )
    return 0
