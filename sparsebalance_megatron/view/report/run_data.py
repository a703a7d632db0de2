# SPDX-License-Identifier: Apache-2.0
"""What a report is made from: a run's step log, and details of some of its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from sparsebalance_megatron.log.rank_log import (
    RankLogs,
    rank_files,
    rank_folder,
    rank_iterations,
    read_rank_logs,
)
from sparsebalance_megatron.log.records import Place
from sparsebalance_megatron.log.step_log import (
    RunLog,
    RunLogError,
    logged_schedule,
    read_run_log,
    read_step_times,
)
from sparsebalance_megatron.log.steps import MicroBatchTimes, Step
from sparsebalance_megatron.view.report.comparison import paired, settled
from sparsebalance_megatron.view.report.timeline import (
    Timeline,
    measured_timeline,
    named_places,
    predicted_timeline,
)

_MOST_PLACES = 1_000_000
MOST_STEPS_READ = 64
"""Steps whose micro-batches are read for means over steps."""


class ReportError(ValueError):
    """There is nothing to report, or nothing to report it with."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A run. ``ranks`` and ``times`` hold the iterations that were read of ``iterations``."""

    log: RunLog
    ranks: RankLogs
    times: Mapping[int, MicroBatchTimes]
    iterations: tuple[int, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        """The configuration in the run's header; empty where it is missing."""
        config = self.log.header.get("config")
        return config if isinstance(config, Mapping) else {}

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.log.problems, *self.ranks.problems)

    def predicted(self, iteration: int) -> Timeline | None:
        times = self.times.get(iteration)
        if times is None:
            return None
        return predicted_timeline(times, logged_schedule(self.log.header))

    def measured(self, iteration: int) -> Timeline | None:
        return measured_timeline(
            self.times.get(iteration),
            self.ranks.steps.get(iteration, {}),
            self.places,
            logged_schedule(self.log.header),
        )

    @property
    def places(self) -> tuple[Place, ...]:
        """All stages of all ranks, by the run's header; empty where it does not say."""
        sizes = [self.log.header.get(key) for key in ("data_parallel_size", "pipeline_stages")]
        match sizes:
            case [int(ranks), int(stages)] if 0 < ranks * stages <= _MOST_PLACES:
                return tuple((rank, stage) for rank in range(ranks) for stage in range(stages))
        return ()


def open_log(directory: Path) -> RunLog:
    """The step log; where only ranks wrote, a log without steps that says so.

    Raises:
        RunLogError: if there is no log of any kind, or no readable step and no rank's log.
    """
    try:
        return read_run_log(directory)
    except RunLogError as error:
        if rank_files(directory):
            return RunLog(directory=directory, header={}, steps=(), problems=(str(error),))
        if any(directory.glob("steps*.jsonl")):
            raise
        raise RunLogError(
            f"{directory}: no log, neither steps.jsonl nor ranks/rank-*.jsonl; train with "
            f"--sparse-balance-log-dir {directory}"
        ) from None


def gather(log: RunLog, iterations: Collection[int]) -> Evidence:
    """Read the details of the given iterations."""
    ranks = read_rank_logs(log.directory, iterations)
    evidence = Evidence(
        log=log,
        ranks=ranks,
        times=read_step_times(log.directory, iterations) if log.steps else {},
        iterations=iterations_of(log),
    )
    missing = [place for place in evidence.places if place not in ranks.headers]
    if not (ranks.headers and missing):
        return evidence
    problem = f"{rank_folder(log.directory)}: no log of {named_places(missing)}; left out"
    return replace(evidence, ranks=replace(ranks, problems=(*ranks.problems, problem)))


def iterations_of(log: RunLog) -> tuple[int, ...]:
    """The iterations of the step log, or without one those of the ranks' logs."""
    if log.steps:
        return tuple(step.iteration for step in log.steps)
    return rank_iterations(log.directory)


def evenly(iterations: Sequence[int]) -> tuple[int, ...]:
    """At most :data:`MOST_STEPS_READ` of them, the first and the last included."""
    if len(iterations) <= MOST_STEPS_READ:
        return tuple(iterations)
    places = np.linspace(0, len(iterations) - 1, MOST_STEPS_READ).round().astype(int)
    return tuple(iterations[place] for place in places)


def choose_iteration(log: RunLog, baseline: RunLog | None, asked: int | None) -> int:
    """The iteration asked for, or else a typical one that was measured.

    Typical: after the warm-up, of the median speedup, or without a baseline of the median time.

    Raises:
        ReportError: if the log does not hold the iteration asked for.
    """
    known = iterations_of(log)
    if asked is not None:
        if asked not in known:
            raise ReportError(
                f"--step {asked}: not in {log.directory}, whose iterations are "
                f"{known[0]} to {known[-1]}; choose one of them"
                if known
                else f"--step {asked}: {log.directory} holds no iteration"
            )
        return asked
    if not known:
        raise ReportError(f"{log.directory}: no iteration is readable")
    measured = [step for step in settled(log.steps) if step.complete]
    values = _speedups(measured, log, baseline) or {
        step.iteration: step.iteration_ms for step in measured if step.iteration_ms
    }
    if not values:
        return measured[-1].iteration if measured else known[-1]
    middle = median(values.values())
    return min(values, key=lambda iteration: abs(values[iteration] - middle))


def _speedups(measured: list[Step], log: RunLog, baseline: RunLog | None) -> dict[int, float]:
    if baseline is None:
        return {}
    drawable = {step.iteration for step in measured}
    return {
        new.iteration: old.iteration_ms / new.iteration_ms
        for old, new in paired(log, baseline)
        if new.iteration in drawable and old.iteration_ms and new.iteration_ms
    }
