# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch``: a run in progress, a row per step."""

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

from sparsebalance_megatron.command_entry import Ended
from sparsebalance_megatron.log.reader import RunLogError, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import RunHeader, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.text_table import shown_ms, wrapped
from sparsebalance_megatron.view.report.numbers import is_dense, split_time, tokens_per_second
from sparsebalance_megatron.view.report.words import slowest_device, slowest_text

_PAUSE_S = 2.0
_TAIL_BYTES = 4 << 20


def add_flags(parser: ArgumentParser) -> None:
    parser.description = (
        "Print a row for every step of a run that writes into --sparse-balance-log-dir, and which "
        "device is slowest. It ends with the run, or by Ctrl-C."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR", help="the log directory")
    parser.add_argument("--once", action="store_true", help="show the last step, and end")


def run(arguments: Namespace) -> int:
    if arguments.once:
        read_run_log(arguments.run_directory, last_bytes=_TAIL_BYTES)
    watch = Watch(arguments.run_directory)
    try:
        while True:
            for line in watch.look():
                print(line, flush=True)
            if arguments.once or watch.ended:
                break
            time.sleep(_PAUSE_S)
    except KeyboardInterrupt as interrupt:  # Ctrl-C is the way to end it
        if isinstance(interrupt, Ended):
            raise
    return 0


_RECENT_STEPS = 10
"""What is said of devices and times looks at so many: single steps are noisy."""
_BAR_CHARACTERS, _COLUMNS = 6, 80
_ROW = "{:>15} {:>9} {:>8} {:>7} {:>8} {:>9} {:>7} {:>6} {}"
_HEADINGS = _ROW.format(
    *("iteration", "step, ms", "tokens/s", "loss", "coverage", "imbalance", "waiting", "to go", "")
).rstrip()
_LEGEND = (
    "tokens/s: a GPU; imbalance: max/mean of what ranks compute;\n"
    "waiting: share of the step, the dots of the bar; to go: minutes"
)


class Watch:
    """Follows a run's step log; ``ended`` once its last iteration is there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ended = False
        self._iteration: int | None = None
        self._said: set[object] = set()

    def look(self) -> Iterator[str]:
        """Lines on what is new since the last look; of the steps at the first look, the last."""
        try:
            log = read_run_log(self.directory, last_bytes=_TAIL_BYTES)
        except RunLogError:
            if self._is_new("no step"):
                yield f"{self.directory}: no step is logged yet"
            return
        iterations = log.header.iterations if log.header else None
        last, shown, recent = log.steps[-1].iteration, self._iteration, log.steps[-_RECENT_STEPS:]
        if shown is None:
            yield from wrapped(lockstep_notice(log.lockstep_ranks) or "", columns=_COLUMNS)
            yield from (_LEGEND, _without_coverage(_HEADINGS, log.header))
        recent_ms = [step.iteration_ms for step in recent if step.iteration_ms]
        typical_ms = median(recent_ms) if recent_ms else None
        new = [step for step in log.steps if shown is not None and step.iteration > shown]
        for step in new or (log.steps[-1:] if last != shown else ()):
            row = step_row(step, typical_ms, iterations, tokens_per_second([step], log.header))
            yield _without_coverage(row, log.header)
        self._iteration = last
        if (slowest := slowest_device(recent)) and self._is_new(slowest[0]):
            yield slowest_text(*slowest, read_rank_logs(self.directory))
        self.ended = iterations is not None and last >= iterations
        if self.ended:
            yield f"{last} of {iterations}, ended"

    def _is_new(self, what: object) -> bool:
        is_new = what not in self._said
        self._said.add(what)
        return is_new


def _without_coverage(row: str, header: RunHeader | None) -> str:
    """A row as it is, or of dense attention, which reads everything, without that column."""
    first, end = _COVERAGE_COLUMN
    return row[:first] + row[end:] if header and is_dense(header.config) else row


_COVERAGE_COLUMN = 42, 51


def step_row(
    step: StepRecord, typical_ms: float | None, iterations: int | None, speed: float | None
) -> str:
    """A step in at most 80 characters; ``typical_ms`` is of recent steps, ``iterations`` of the
    whole run, ``speed`` in tokens a second."""
    figures, split, left, bar = step.figures, split_time([step]), "", ""
    waiting = split.waiting_ms / split.step_ms if split else None
    if waiting is not None:
        dots = round(waiting * _BAR_CHARACTERS)
        bar = "#" * (_BAR_CHARACTERS - dots) + "." * dots
    if iterations is not None and typical_ms is not None:
        left = f"{max(0, iterations - step.iteration) * typical_ms / 60e3:,.0f}"
    row = _ROW.format(
        step.iteration if iterations is None else f"{step.iteration} of {iterations}",
        _cell(step.iteration_ms, shown_ms),
        _cell(speed, "{:,.0f}".format),
        _cell(step.lm_loss, "{:.4g}".format),
        _cell(figures.coverage, "{:.3f}".format),
        _cell(figures.imbalance, "{:.2f}".format),
        _cell(waiting, "{:.0%}".format),
        left,
        bar,
    )
    # The bar gives way to wide numbers.
    return row[:_COLUMNS].rstrip()


def _cell(value: float | None, layout: Callable[[float], str]) -> str:
    return "-" if value is None else layout(value)
