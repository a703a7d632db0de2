# SPDX-License-Identifier: Apache-2.0
"""What a report is made from: a run's step log, and what its ranks logged of some steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import median

from sparsebalance_megatron.log.log_directory import rank_folder
from sparsebalance_megatron.log.reader import RankLogs, RunLog, read_rank_logs
from sparsebalance_megatron.log.records import StepRecord
from sparsebalance_megatron.view.report.comparison import paired, settled
from sparsebalance_megatron.view.report.timeline import (
    Timeline,
    measured_timeline,
    named_places,
    simulated_timeline,
)


class ReportError(ValueError):
    """There is nothing to report, or nothing to report it with."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """A run. ``ranks`` holds the iterations that were read."""

    log: RunLog
    ranks: RankLogs

    @property
    def problems(self) -> tuple[str, ...]:
        return (*self.log.problems, *self.ranks.problems)

    def step(self, iteration: int) -> StepRecord | None:
        return next((step for step in self.log.steps if step.iteration == iteration), None)

    def timeline(self, side: str, iteration: int) -> Timeline | None:
        """Predicted or measured; None where it is not known."""
        step = self.step(iteration)
        if step is None:
            return None
        if side == "predicted":
            return simulated_timeline(step, side, self.log.schedule)
        contents = self.ranks.steps.get(iteration, {})
        return measured_timeline(step, contents, self.log.schedule)


def gather(log: RunLog, iterations: Collection[int]) -> Evidence:
    """Read what the ranks logged of the given iterations."""
    ranks = read_rank_logs(log.directory, iterations)
    missing = [place for place in log.steps[-1].places if place not in ranks.headers]
    if ranks.headers and missing:
        problem = f"{rank_folder(log.directory)}: no log of {named_places(missing)}; left out"
        ranks = replace(ranks, problems=(*ranks.problems, problem))
    return Evidence(log=log, ranks=ranks)


def choose_iteration(log: RunLog, baseline: RunLog | None, asked: int | None) -> int:
    """The iteration asked for, or else a typical one that was measured.

    Typical: after the warm-up, of the median speedup, or without a baseline of the median time.

    Raises:
        ReportError: if the log does not hold the iteration asked for.
    """
    if asked is not None:
        known = [step.iteration for step in log.steps]
        if asked not in known:
            raise ReportError(
                f"--step {asked}: not in {log.directory}, whose iterations are "
                f"{known[0]} to {known[-1]}; choose one of them"
            )
        return asked
    measured = [step for step in settled(log.steps) if step.complete]
    values = _speedups(measured, log, baseline) or {
        step.iteration: step.iteration_ms for step in measured if step.iteration_ms
    }
    if not values:
        return (measured or log.steps)[-1].iteration
    middle = median(values.values())
    return min(values, key=lambda iteration: abs(values[iteration] - middle))


def _speedups(measured: list[StepRecord], log: RunLog, baseline: RunLog | None) -> dict[int, float]:
    if baseline is None:
        return {}
    drawable = {step.iteration for step in measured}
    return {
        new.iteration: old.iteration_ms / new.iteration_ms
        for old, new in paired(log, baseline)
        if new.iteration in drawable and old.iteration_ms and new.iteration_ms
    }
