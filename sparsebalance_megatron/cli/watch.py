# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch``: a run in progress, a row per step."""

from __future__ import annotations

import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.cli.output import OutputError
from sparsebalance_megatron.log.files import step_log_path
from sparsebalance_megatron.log.reader import RunLog, RunLogError, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import SIDES, Place, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.text_table import printable, shown_ms, wrapped
from sparsebalance_megatron.view.report.numbers import TimeSplit, split_time

_SLOWEST_INTERVAL_S = 3600.0
_COLUMNS = 80
_TAIL_BYTES = 4 << 20
"""Bytes at the end of the log that each look reads."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``watch``."""
    parser.description = (
        "Print a row for every step of a run that writes into --sparse-balance-log-dir, and which "
        "device is slowest. It ends with the run, or by Ctrl-C. `sparse-balance report --follow` "
        "draws the steps."
    )
    parser.add_argument("run_directory", type=Path, metavar="RUN_DIR", help="the log directory")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks"
    )
    parser.add_argument("--once", action="store_true", help="show the last step, and end")


def run(arguments: Namespace) -> int:
    """Follow the log until the run has ended, or until interrupted."""
    if not 0.05 <= arguments.interval <= _SLOWEST_INTERVAL_S:
        raise OutputError(f"--interval {arguments.interval}: must be 0.05 to 3600 seconds")
    if arguments.once:
        read_run_log(arguments.run_directory, last_bytes=_TAIL_BYTES)
    watch = Watch(arguments.run_directory)
    with suppress(KeyboardInterrupt):  # the way to end it
        while True:
            for line in watch.look():
                print(line, flush=True)
            if arguments.once or watch.ended:
                break
            time.sleep(arguments.interval)
    return 0


_RECENT_STEPS = 10
"""What is said of devices and times looks at so many: single steps are noisy."""
_SILENT_STEPS = 5
"""Typical steps without a line, after which a run is called silent."""
_MIN_SILENCE_S = 60.0
_SLOW = 1.05
"""A device that takes so much longer than the median is named."""
_BAR_CHARACTERS = 14
_ROW = "{:>15} {:>8} {:>7} {:>8} {:>6} {:>9} {:>6} {}"
_HEADINGS = _ROW.format(
    *("iteration", "step, ms", "loss", "coverage", "base", "imbalance", "to go", "of its time")
)
_LEGEND = (
    "base: coverage of base budgets; imbalance: max/mean of what ranks compute;\n"
    "to go: minutes; of its time: # computing, . waiting, blank the rest"
)


class Watch:
    """Follows a run's step log; ``ended`` once its last iteration is there."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ended = False
        self._hosts: Mapping[Place, str] = {}
        self._size_bytes, self._changed_s = -1, 0.0
        self._iteration: int | None = None
        self._said: set[str] = set()

    def look(self) -> Iterator[str]:
        """Lines on what is new since the last look; of the steps at the first look, the last."""
        try:
            file = step_log_path(self.directory).stat()
            log = read_run_log(self.directory, last_bytes=_TAIL_BYTES)
        except (RunLogError, OSError):  # not there yet, or between two renames
            yield from self._once(f"{self.directory}: no step is logged yet")
            return
        iterations = log.header.iterations if log.header else None
        if self._iteration is None:
            yield from wrapped(lockstep_notice(log.lockstep_ranks) or "", _COLUMNS)
            yield from (_LEGEND, _HEADINGS)
        last, shown = log.steps[-1].iteration, self._iteration
        new = [step for step in log.steps if shown is not None and step.iteration > shown]
        for step in new or (log.steps[-1:] if last != shown else ()):
            yield step_row(step, _typical_ms(log.steps[-_RECENT_STEPS:]), iterations)
        self._iteration = last
        if (slowest := slowest_device(log.steps[-_RECENT_STEPS:])) and slowest.slowness > _SLOW:
            yield from self._once(self._named(slowest, log), slowest.place)
        if log.damaged_lines:
            yield from self._once(f"{log.damaged_lines} damaged lines left out")
        of_all = f"{last}" if iterations is None else f"{last} of {iterations}"
        self.ended = iterations is not None and last >= iterations
        if self.ended:
            yield f"{of_all}, ended"
        elif (silent_s := self._silent_s(file)) > patience_s(log.steps):
            why = "hangs or was stopped" if iterations else "has ended, or hangs"
            yield from self._once(
                f"{of_all}, silent for {silent_s / 60:.0f} min: the run {why}", last
            )

    def _once(self, text: str, about: object = None) -> Iterator[str]:
        """The text, unless it, or another about the same, was said last."""
        key = str(text if about is None else about)
        if key not in self._said:
            self._said.add(key)
            yield text

    def _silent_s(self, file: os.stat_result) -> float:
        """Seconds since the log has grown."""
        now_s = time.monotonic()
        if file.st_size != self._size_bytes:
            # At the first look the file says how old it is, by a clock that may be set.
            age_s = time.time() - file.st_mtime if self._size_bytes < 0 else 0.0
            self._size_bytes, self._changed_s = file.st_size, now_s - max(0.0, age_s)
        return now_s - self._changed_s

    def _named(self, slowest: SlowDevice, log: RunLog) -> str:
        if len(self._hosts) < len(log.steps[-1].places):
            # Ranks write their first lines one after the other, perhaps late.
            headers = read_rank_logs(self.directory, ()).headers
            self._hosts = {place: header.host for place, header in headers.items()}
        (rank, stage), host = slowest.place, self._hosts.get(slowest.place)
        where = f" on {printable(host)}" if host else ""
        return (
            f"slowest: rank {rank} stage {stage}{where}, {slowest.slowness:.2f} times the median "
            "time for its work"
        )


def step_row(step: StepRecord, typical_ms: float | None, iterations: int | None) -> str:
    """A step in at most 80 characters.

    Args:
        typical_ms: of recent steps.
        iterations: of the whole run, None where that is unknown.
    """
    figures, left = step.figures, ""
    if iterations is not None and typical_ms is not None:
        left = f"{max(0, iterations - step.iteration) * typical_ms / 60e3:,.0f}"
    return _ROW.format(
        step.iteration if iterations is None else f"{step.iteration} of {iterations}",
        _cell(step.iteration_ms, shown_ms),
        _cell(step.lm_loss, "{:.4g}".format),
        _cell(figures.coverage, "{:.3f}".format),
        _cell(figures.coverage_base, "{:.3f}".format),
        _cell(figures.imbalance, "{:.2f}".format),
        left,
        _bar(split_time([step])),
    ).rstrip()


def _cell(value: float | None, layout: Callable[[float], str]) -> str:
    return "-" if value is None else layout(value)


def _bar(split: TimeSplit | None) -> str:
    """Shares of computing and waiting in the step's time."""
    if split is None or not split.step_ms > 0.0:
        return ""
    busy, free = (
        round(_BAR_CHARACTERS * ms / split.step_ms)
        for ms in (split.compute_ms, split.compute_ms + split.waiting_ms)
    )
    return "#" * busy + "." * (free - busy)


class SlowDevice(NamedTuple):
    """The stage that exceeds its prediction most; ``slowness`` is relative to the median stage."""

    place: Place
    slowness: float


def patience_s(steps: Sequence[StepRecord]) -> float:
    """For how long a run that works may log nothing."""
    typical_ms = _typical_ms(steps[-_RECENT_STEPS:]) or 0.0
    return max(_MIN_SILENCE_S, _SILENT_STEPS * typical_ms / 1e3)


def slowest_device(records: Sequence[StepRecord]) -> SlowDevice | None:
    """The device that is slowest over the last steps of one shape; long steps count for more."""
    alike = [each for each in records if each.shape[:2] == records[-1].shape[:2] and each.complete]
    if not alike or len(alike[-1].places) < 2:
        return None
    predicted_RP, measured_RP = (
        np.sum([stage_busy_ms(each.times_2RPVM(side)) for each in alike], axis=0) for side in SIDES
    )
    if not (predicted_RP > 0.0).all():
        return None
    ratio_RP = measured_RP / predicted_RP
    typical = float(np.median(ratio_RP))
    if not typical > 0.0:
        return None
    place = alike[-1].places[int(ratio_RP.argmax())]
    return SlowDevice(place, float(ratio_RP[place]) / typical)


def _typical_ms(steps: Sequence[StepRecord]) -> float | None:
    known_ms = [step.iteration_ms for step in steps if step.iteration_ms]
    return median(known_ms) if known_ms else None
