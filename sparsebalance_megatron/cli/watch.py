# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance watch``: a run in progress, a line per step."""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.cli.output import OutputError
from sparsebalance_megatron.log.log_directory import step_log_path
from sparsebalance_megatron.log.reader import RunLog, RunLogError, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import SIDES, Place, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.text_table import printable
from sparsebalance_megatron.view.report.words import ms_text, text_of

_SLOWEST_INTERVAL_S = 3600.0
_TAIL_BYTES = 4 << 20
"""Bytes at the end of the log that each look reads."""


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
    if arguments.once:
        read_run_log(arguments.run_directory, last_bytes=_TAIL_BYTES)
    with suppress(KeyboardInterrupt):  # the way to end it
        for line in lines(arguments.run_directory, arguments.interval):
            print(line, flush=True)
            if arguments.once:
                break
    return 0


def lines(directory: Path, interval_s: float) -> Iterator[str]:
    """A line at the first look, whenever the log has a new step, and once when it is silent.

    A line on what times include stands before the first step's.
    """
    hosts: Mapping[Place, str] = {}
    told = False
    size_bytes, grown_s = -1, 0.0
    shown: object = None
    while True:
        try:
            file = step_log_path(directory).stat()
            log = read_run_log(directory, last_bytes=_TAIL_BYTES)
        except (RunLogError, OSError):  # not there yet, or between two renames
            if shown is None:
                yield (shown := f"{directory}: no step is logged yet")
        else:
            now_s = time.monotonic()
            if file.st_size != size_bytes:
                # At the first look the file says how old it is, by a clock that may be set.
                age_s = time.time() - file.st_mtime if size_bytes < 0 else 0.0
                size_bytes, grown_s = file.st_size, now_s - max(0.0, age_s)
            silent_s = now_s - grown_s
            is_silent = silent_s > patience_s(log.steps)
            if shown != (state := (log.steps[-1].iteration, is_silent)):
                shown = state
                if len(hosts) < len(log.steps[-1].places):
                    # Ranks write their first lines one after the other, perhaps late.
                    headers = read_rank_logs(directory, ()).headers
                    hosts = {place: header.host for place, header in headers.items()}
                status = status_line(log, hosts, silent_s if is_silent else None)
                notice = None if told else lockstep_notice(log.lockstep_ranks)
                told = True
                yield f"{notice}\n{status}" if notice else status
        time.sleep(interval_s)


_RECENT_STEPS = 10
"""What is said of devices and times looks at so many: single steps are noisy."""
_SILENT_STEPS = 5
"""Typical steps without a line, after which a run is called silent."""
_MIN_SILENCE_S = 60.0


class SlowDevice(NamedTuple):
    """The stage that exceeds its prediction most; ``slowness`` is relative to the median stage."""

    place: Place
    slowness: float


def status_line(log: RunLog, hosts: Mapping[Place, str], silent_s: float | None) -> str:
    """The last step, and what the steps before it say.

    Args:
        hosts: of every stage of every rank, as far as the ranks' logs name them.
        silent_s: seconds since the log grew, where that says something.
    """
    step, recent = log.steps[-1], log.steps[-_RECENT_STEPS:]
    measured_ms, predicted_ms = (
        max(each) if each else None for each in (step.measured_rank_ms, step.predicted_rank_ms)
    )
    parts = [
        f"iteration {step.iteration}",
        f"{ms_text(step.iteration_ms)} ms, recently {ms_text(_typical_ms(recent))}",
        f"loss {text_of(step.lm_loss, '.4g')}",
        f"coverage {text_of(step.coverage.mean, '.3f')}, at base budgets "
        f"{text_of(step.coverage.base_mean, '.3f')}",
        f"busiest rank {ms_text(measured_ms)} ms, predicted {ms_text(predicted_ms)}",
    ]
    if (slowest := slowest_device(recent)) is not None:
        (rank, stage), slowness = slowest
        host = hosts.get(slowest.place)
        where = f" on {printable(host)}" if host else ""
        parts.append(f"slowest rank {rank} stage {stage}{where} {slowness:.2f}x")
    if silent_s is not None:
        parts.append(f"silent for {silent_s / 60:.0f} min: the run has ended, or hangs")
    if log.damaged_lines:
        parts.append(f"{log.damaged_lines} damaged lines left out")
    return " | ".join(parts)


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
