# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance report``: a run's logs as one HTML file, and in short on the terminal."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from sparsebalance_megatron.cli.output import OutputError, open_console, print_notes, write_text
from sparsebalance_megatron.cli.summary import show
from sparsebalance_megatron.report.comparison import Comparison
from sparsebalance_megatron.report.comparison_table import columns_of, table_of
from sparsebalance_megatron.report.page import render
from sparsebalance_megatron.report.run_report import make_report
from sparsebalance_megatron.report.sentences import headline
from sparsebalance_megatron.report.server import ADDRESS, PageServer, log_version

_REFRESH_S = 15.0
_LARGEST_PORT = 65535


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
    shown = parser.add_mutually_exclusive_group()
    shown.add_argument(
        "--json", action="store_true", help="print the page's numbers as JSON, and nothing else"
    )
    shown.add_argument(
        "--serve",
        type=int,
        metavar="PORT",
        help="show the page at http://127.0.0.1:PORT, made anew as the run goes on; writes no file",
    )


def run(arguments: Namespace) -> int:
    """Read, draw, write, print.

    Raises:
        RunLogError: if a directory holds no readable log.
        ReportError: if matplotlib is not installed, or the step is not logged.
        OutputError: if the page cannot be written or the port cannot be had, or rich is not
            installed; the page is written by then.
    """
    if arguments.serve is not None:
        return _serve(arguments)
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


def _serve(arguments: Namespace) -> int:
    """Serve until interrupted."""
    if not 0 <= arguments.serve <= _LARGEST_PORT:
        raise OutputError(f"--serve {arguments.serve}: must be a port, 0 to {_LARGEST_PORT}")
    directories = [each for each in (arguments.run_directory, arguments.baseline) if each]
    try:
        server = PageServer(
            arguments.serve,
            lambda: render(
                make_report(arguments.run_directory, arguments.baseline, arguments.step).page
            ),
            lambda: log_version(*directories),
            _REFRESH_S,
        )
    except OSError as error:
        raise OutputError(
            f"--serve {arguments.serve}: {error.strerror}; choose another port"
        ) from error
    with server, suppress(KeyboardInterrupt):
        print(f"http://{ADDRESS}:{server.server_port} shows the report; Ctrl-C ends it", flush=True)
        server.serve_forever()
    return 0
