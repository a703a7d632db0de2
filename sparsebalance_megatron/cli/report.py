# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance report``: a run's logs as one HTML file, and in short on the terminal."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from sparsebalance_megatron.cli.output import (
    print_json,
    refuse_output_over_logs,
    write_text,
)
from sparsebalance_megatron.cli.summary import add_beside, as_document, show
from sparsebalance_megatron.config import ConfigError
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
    add_beside(parser)
    parser.add_argument(
        "--step",
        type=int,
        metavar="ITERATION",
        help="draw this step; default: one that is typical of both runs in time and in waiting",
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
    baseline, beside = arguments.baseline, arguments.beside
    if beside and baseline is None:
        raise ConfigError("--beside: compares with --baseline; give that too")
    refuse_output_over_logs(arguments.output, arguments.run_directory, baseline, *beside)
    report = make_report(arguments.run_directory, baseline, arguments.step, beside)
    write_text(arguments.output, render_page(report))
    if arguments.json:
        print_json(as_document(report.numbers))
        return 0
    show(report.numbers, report.notes)
    print(
        *report.missing,
        f"iteration {report.iteration} is drawn; written to {arguments.output}",
        sep="\n",
    )
    return 0
