# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance report``: a run's logs as one HTML file, and in short on the terminal."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sparsebalance_megatron.cli.output import (
    OutputError,
    check_outputs,
    print_json,
    refuse_output_over_logs,
    write_text,
)
from sparsebalance_megatron.cli.summary import show
from sparsebalance_megatron.log.reader import RunLogError
from sparsebalance_megatron.view.report.run_report import Report, make_report, render_page

_LONGEST_INTERVAL_S = 3600.0


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``report``."""
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
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--json", action="store_true", help="print the page's numbers as JSON, and nothing else"
    )
    shown.add_argument(
        "--follow",
        type=float,
        metavar="SECONDS",
        help="write the page anew every so many seconds, at which a browser reloads it; Ctrl-C "
        "ends it",
    )


def run(arguments: Namespace) -> int:
    """Read, draw, write, print."""
    check_outputs({"--output": (arguments.output, (".html", ".htm"))})
    refuse_output_over_logs(arguments.output, arguments.run_directory, arguments.baseline)
    if arguments.follow is not None:
        return _follow(arguments)
    report = _write(arguments)
    if arguments.json:
        print_json(asdict(report.numbers))
        return 0
    show(report.numbers, report.notes)
    print(
        *report.not_drawn,
        f"iteration {report.iteration} is drawn; written to {arguments.output}",
        sep="\n",
    )
    return 0


def _write(arguments: Namespace, refresh_s: float | None = None) -> Report:
    report = make_report(arguments.run_directory, arguments.baseline, arguments.step)
    write_text(arguments.output, render_page(report, refresh_s))
    return report


def _follow(arguments: Namespace) -> int:
    """Write until interrupted, and then once more a page that does not reload itself."""
    interval_s = arguments.follow
    if not 1.0 <= interval_s <= _LONGEST_INTERVAL_S:
        raise OutputError(f"--follow {interval_s:g}: must be 1 to {_LONGEST_INTERVAL_S:g} seconds")
    print(f"{arguments.output} follows {arguments.run_directory}; Ctrl-C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        while True:
            # A run that has just begun has logged no step.
            with suppress(RunLogError):
                _write(arguments, interval_s)
            time.sleep(interval_s)
    _write(arguments)
    return 0
