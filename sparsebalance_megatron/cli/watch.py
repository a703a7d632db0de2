# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch``: a run in progress, a line per step."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from sparsebalance_megatron.cli.output import OutputError
from sparsebalance_megatron.log.reader import RunLogError, read_hosts, read_log_tail
from sparsebalance_megatron.log.records import Place
from sparsebalance_megatron.view.report.live import patience_s, status_line

_SLOWEST_INTERVAL_S = 3600.0


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``watch``."""
    parser.description = (
        "Print a line for every step of a run that writes into --sparse-balance-log-dir: time, "
        "loss, coverage, measured and predicted time of the busiest rank, the slowest device by "
        "host. Ctrl-C ends it. `sparse-balance report --follow` draws the steps."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR", help="the log directory")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks"
    )
    parser.add_argument("--once", action="store_true", help="show the last step, and end")


def run(arguments: Namespace) -> int:
    """Follow the log until interrupted."""
    if not 0.05 <= arguments.interval <= _SLOWEST_INTERVAL_S:
        raise OutputError(f"--interval {arguments.interval}: must be 0.05 to 3600 seconds")
    if arguments.once and not read_log_tail(arguments.run_directory).steps:
        raise OutputError(_no_step(arguments.run_directory))
    with suppress(KeyboardInterrupt):  # the way to end it
        for line in lines(arguments.run_directory, arguments.interval):
            print(line, flush=True)
            if arguments.once:
                break
    return 0


def lines(directory: Path, interval_s: float) -> Iterator[str]:
    """A line at the first look, whenever the log has a new step, and once when it is silent."""
    hosts: Mapping[Place, str] = {}
    size_bytes, grown_s = -1, 0.0
    shown: object = None
    while True:
        tail = None
        with suppress(RunLogError):  # not there yet, or between two renames
            tail = read_log_tail(directory)
        if tail is not None and tail.steps:
            now_s = time.monotonic()
            if tail.size_bytes != size_bytes:
                # At the first look the file says how old it is, by a clock that may be set.
                age_s = time.time() - tail.written_unix_s if size_bytes < 0 else 0.0
                size_bytes, grown_s = tail.size_bytes, now_s - max(0.0, age_s)
            silent_s = now_s - grown_s
            is_silent = silent_s > patience_s(tail.steps)
            if shown != (state := (tail.steps[-1].iteration, is_silent)):
                shown = state
                if len(hosts) < len(tail.steps[-1].places):
                    # Ranks write their first lines one after the other, perhaps late.
                    hosts = read_hosts(directory)
                yield status_line(tail, hosts, silent_s if is_silent else None)
        elif shown is None:
            yield (shown := _no_step(directory))
        time.sleep(interval_s)


def _no_step(directory: Path) -> str:
    return f"{directory}: no step is logged yet"
