# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch``: a run in progress, in the terminal."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from sparsebalance_megatron.cli.output import OutputError, open_console
from sparsebalance_megatron.log.follow import StepLogFollower, hosts_of
from sparsebalance_megatron.log.reader import RunLogError
from sparsebalance_megatron.log.records import Place
from sparsebalance_megatron.text_table import terminal_columns
from sparsebalance_megatron.view.report.live import LiveView, live_view, status_line, view_lines

_SLOWEST_INTERVAL_S = 3600.0


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``watch``."""
    parser.description = (
        "Show the last step of a run that writes into --sparse-balance-log-dir: its timeline, the "
        "slowest device by host, predicted against measured time, coverage and loss. Ctrl-C ends "
        "it. A run that has ended is shown as it ended."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR", help="the log directory")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks"
    )
    parser.add_argument(
        "--plain", action="store_true", help="one line of text per step; needs no rich"
    )
    parser.add_argument("--once", action="store_true", help="show the last step, and end")


def run(arguments: Namespace) -> int:
    """Follow the log and show it until interrupted.

    Raises:
        RunLogError: with --once, if there is no readable step.
        OutputError: if a value is wrong, or rich is not installed and --plain not given.
    """
    if not 0.05 <= arguments.interval <= _SLOWEST_INTERVAL_S:
        raise OutputError(f"--interval {arguments.interval}: must be 0.05 to 3600 seconds")
    follower = StepLogFollower(arguments.run_directory)
    try:
        if arguments.once:
            return _once(follower, plain=arguments.plain)
        views = _views(follower, arguments.interval, time.sleep)
        if arguments.plain:
            for view in views:
                print(_waiting(follower) if view is None else status_line(view), flush=True)
            return 0
        _live(follower, views)
        return 0
    except KeyboardInterrupt:  # the way to end it
        return 0


def _once(follower: StepLogFollower, *, plain: bool) -> int:
    follower.poll()
    view = live_view(follower, hosts_of(follower.directory))
    if view is None:
        raise OutputError(_waiting(follower))
    if plain:
        print(status_line(view))
    else:
        print(*view_lines(view, terminal_columns()), sep="\n")
    return 0


def _views(
    follower: StepLogFollower, interval_s: float, sleep: Callable[[float], None]
) -> Iterator[LiveView | None]:
    """A view whenever there is something new, and once when the run falls silent.

    None, once, while there is no step yet.
    """
    hosts: Mapping[Place, str] = {}
    waited = said_silent = False
    while True:
        is_new = _poll(follower)
        if is_new and len(hosts) < len(follower.steps[-1].places):
            # Ranks write their first lines one after the other, over a slow disk perhaps late.
            hosts = hosts_of(follower.directory)
        view = live_view(follower, hosts)
        if view is None:
            if not waited:
                waited = True
                yield None
        elif is_new or (view.silent_s is not None and not said_silent):
            said_silent = view.silent_s is not None
            yield view
        sleep(interval_s)


def _poll(follower: StepLogFollower) -> bool:
    """As :meth:`StepLogFollower.poll`; a log that is not there yet has nothing new."""
    try:
        return follower.poll()
    except RunLogError:
        return False


def _live(follower: StepLogFollower, views: Iterator[LiveView | None]) -> None:
    console = open_console(", or use --plain")
    from rich.live import Live
    from rich.text import Text

    with Live(console=console, auto_refresh=False) as screen:
        for view in views:
            lines = [_waiting(follower)] if view is None else view_lines(view, console.width)
            screen.update(Text("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)


def _waiting(follower: StepLogFollower) -> str:
    return f"{follower.directory}: no step is logged yet"
