# SPDX-License-Identifier: Apache-2.0
"""What a report is made from: a run's step log, and what its ranks logged of some steps."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.log.log_directory import rank_folder
from sparsebalance_megatron.log.reader import RankLogs, RunLog, read_rank_logs
from sparsebalance_megatron.log.records import StepRecord
from sparsebalance_megatron.view.report.comparison import paired, settled
from sparsebalance_megatron.view.report.explanation import split_time
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

    Typical: after the warm-up, nearest to the means of step time and of the share of waiting, of
    both runs.

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
    steps = [(step,) for step in settled(log.steps)]
    for candidates in (paired(log, baseline) if baseline else [], steps):
        traits = {each[-1].iteration: _traits(each) for each in candidates}
        typical = {iteration: values for iteration, values in traits.items() if values}
        if typical:
            found = np.array(list(typical.values()))
            means = np.maximum(found.mean(axis=0), 1e-9)
            distance = np.abs(found / means - 1.0).sum(axis=1)
            return list(typical)[int(distance.argmin())]
    return next((step for (step,) in reversed(steps) if step.complete), log.steps[-1]).iteration


def _traits(sides: Sequence[StepRecord]) -> list[float]:
    """Time and share of waiting of the step, of every run; empty where one is not known."""
    splits = [split_time([step]) if step.complete else None for step in sides]
    known = [split for split in splits if split is not None and split.step_ms > 0.0]
    if len(known) < len(sides):
        return []
    return [value for split in known for value in (split.step_ms, split.waiting_ms / split.step_ms)]
