# SPDX-License-Identifier: Apache-2.0
"""Two runs of the same samples in numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from sparsebalance_megatron.log.reader import RunLog
from sparsebalance_megatron.log.records import StepRecord
from sparsebalance_megatron.plan.metrics import imbalance
from sparsebalance_megatron.view.report.explanation import (
    Explanation,
    TimeSplit,
    explain,
    split_time,
)

WARM_UP_STEPS = 5


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in numbers; None where nothing was measured.

    All but the losses and the list of times leave out the warm-up: the first
    :data:`WARM_UP_STEPS` steps, or the first fifth of a short run. Medians are over steps.

    - ``iteration_ms``: every step that has a time, warm-up included.
    - ``rank_imbalance``: median of max/mean over the data-parallel ranks' measured busy times, a
      rank's busy time being that of its busiest pipeline stage.
    - ``predicted_ms``, ``measured_ms``: median busy time of the busiest rank.
    - ``predicted_error``: median of ``|predicted / measured - 1|`` over steps and ranks, busy time
      against busy time, so that waiting is in neither.
    - ``lower_bound_ms``: median of the planner's bound on a step: no placement can be faster.
    - ``work_ratio``: median of predicted work over that of the same samples at base budgets; below
      1 attention was cut, so a speedup is not balance alone.
    - ``split``: where the mean step's time goes.
    - ``coverage_mean``: mean over steps of the mean score coverage of samples and layers.
    - ``coverage_gain``, ``coverage_gain_by_token``: mean coverage less that of base budgets, where
      every sample counts alike, and where every token does.
    """

    steps: int
    warm_up_steps: int
    iteration_ms_median: float | None
    iteration_ms: tuple[float, ...]
    loss_first: float | None
    loss_last: float | None
    rank_imbalance: float | None
    coverage_mean: float | None
    coverage_gain: float | None
    coverage_gain_by_token: float | None
    predicted_error: float | None
    predicted_ms: float | None
    measured_ms: float | None
    lower_bound_ms: float | None
    work_ratio: float | None
    split: TimeSplit | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs over the same samples.

    ``speedup``: baseline's median iteration time over the run's. ``speedup_paired``: median of that
    ratio step by step. ``speedup_total``: of the time all these steps took together. The last two,
    and the explanation of the difference, are None unless both runs saw the same number of tokens
    in every step; otherwise the steps hold different samples.
    """

    baseline: RunSummary
    sparse_balance: RunSummary
    speedup: float | None
    speedup_paired: float | None
    speedup_total: float | None
    problems: tuple[str, ...]
    explanation: Explanation | None = None


def compare(baseline: RunLog, balanced: RunLog) -> Comparison:
    """Both runs in numbers, and how much faster the second is."""
    problems = [*baseline.problems, *balanced.problems]
    if len(baseline.steps) != len(balanced.steps):
        problems.append(
            f"{len(baseline.steps)} steps in {baseline.directory}, {len(balanced.steps)} in "
            f"{balanced.directory}: last losses are not of the same step"
        )
    pairs = _common(settled(balanced.steps), settled(baseline.steps))
    differing = [old for old, new in pairs if old.tokens != new.tokens]
    if differing:
        problems.append(
            f"token counts differ in {len(differing)} of {len(pairs)} steps, first in iteration "
            f"{differing[0].iteration}: other samples, so steps are not compared one by one"
        )
    before, after = summarize(baseline.steps), summarize(balanced.steps)
    return Comparison(
        baseline=before,
        sparse_balance=after,
        speedup=_ratio(before.iteration_ms_median, after.iteration_ms_median),
        speedup_paired=None
        if differing
        else _average(_ratio(old.iteration_ms, new.iteration_ms) for old, new in pairs),
        speedup_total=None if differing else _total_speedup(pairs),
        problems=tuple(problems),
        explanation=None if differing else explain(pairs),
    )


def summarize(steps: Sequence[StepRecord]) -> RunSummary:
    """One run in numbers; see :class:`RunSummary`."""
    warm_up = warm_up_steps(len(steps))
    after = settled(steps)
    losses = [step.lm_loss for step in steps if step.lm_loss is not None]
    return RunSummary(
        steps=len(steps),
        warm_up_steps=warm_up,
        iteration_ms_median=_average(step.iteration_ms for step in after),
        iteration_ms=tuple(step.iteration_ms for step in steps if step.iteration_ms is not None),
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        rank_imbalance=_average(
            imbalance(step.measured_rank_ms) for step in after if step.measured_rank_ms
        ),
        coverage_mean=_average((step.coverage.mean for step in after), fmean),
        coverage_gain=_average(
            (
                step.coverage.mean - step.coverage.base_mean
                for step in after
                if step.coverage.mean is not None and step.coverage.base_mean is not None
            ),
            fmean,
        ),
        coverage_gain_by_token=_gain_by_token(after),
        predicted_error=_average(error for step in after for error in _errors(step)),
        predicted_ms=_average(_largest(step.predicted_rank_ms) for step in after),
        measured_ms=_average(_largest(step.measured_rank_ms) for step in after),
        lower_bound_ms=_average(step.predicted.lower_bound_ms for step in after),
        work_ratio=_average(step.predicted.work_ratio for step in after),
        split=split_time(after),
    )


def warm_up_steps(steps: int) -> int:
    """Steps left out at the start: five, or a fifth of a run shorter than 25 steps."""
    return min(WARM_UP_STEPS, steps // 5)


def settled(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps after the warm-up."""
    return steps[warm_up_steps(len(steps)) :]


def paired(run: RunLog, baseline: RunLog) -> list[tuple[StepRecord, StepRecord]]:
    """(baseline's step, the run's step) after the warm-up in which both saw as many tokens."""
    common = _common(settled(run.steps), settled(baseline.steps))
    return [(old, new) for old, new in common if old.tokens == new.tokens]


def _common(
    run: Sequence[StepRecord], baseline: Sequence[StepRecord]
) -> list[tuple[StepRecord, StepRecord]]:
    """(baseline's step, the run's step) of the same iteration."""
    old = {step.iteration: step for step in baseline}
    return [(old[step.iteration], step) for step in run if step.iteration in old]


def _total_speedup(pairs: Iterable[tuple[StepRecord, StepRecord]]) -> float | None:
    timed = [
        (old.iteration_ms, new.iteration_ms)
        for old, new in pairs
        if old.iteration_ms is not None and new.iteration_ms is not None
    ]
    return _ratio(sum(old for old, _ in timed), sum(new for _, new in timed))


def _gain_by_token(steps: Sequence[StepRecord]) -> float | None:
    known = [
        (step.coverage.lost_by_token, step.tokens)
        for step in steps
        if step.coverage.lost_by_token is not None and step.tokens
    ]
    return -fmean(*zip(*known, strict=True)) if known else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator is not None and denominator else None


def _largest(times_ms: Sequence[float] | None) -> float | None:
    return max(times_ms) if times_ms else None


def _errors(step: StepRecord) -> list[float]:
    """Relative error of every rank's predicted time; empty where a side is missing."""
    if step.measured_rank_ms is None or step.predicted_rank_ms is None:
        return []
    pairs = zip(step.predicted_rank_ms, step.measured_rank_ms, strict=True)
    return [abs(predicted / measured - 1.0) for predicted, measured in pairs if measured > 0.0]


def _average(
    values: Iterable[float | None], how: Callable[[list[float]], float] = median
) -> float | None:
    """``how`` of the values that are known; None where none is."""
    known = [value for value in values if value is not None]
    return how(known) if known else None
