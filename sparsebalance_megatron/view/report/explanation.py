# SPDX-License-Identifier: Apache-2.0
"""Why steps take as long as they do, and why those of one run are faster than those of another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.log.records import StepRecord

NOISY_MACHINE_SHARE = 0.05
"""Above this share of the baseline's step, what the machine did to it is said aloud."""
_LEAST_PAIRS_FOR_INTERVAL = 6
_RESAMPLES = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """Where the mean step's time went, in ms; the three parts add up to it.

    ``compute_ms``: forwards and backwards, the mean over all stages of all ranks. ``waiting_ms``:
    the rest of the time until the last of them has finished its last backward. ``rest_ms``:
    everything after that: reducing gradients, the optimizer, reading, logging.
    """

    steps: int
    compute_ms: float
    waiting_ms: float
    rest_ms: float

    @property
    def step_ms(self) -> float:
        return self.compute_ms + self.waiting_ms + self.rest_ms


class Change(NamedTuple):
    """One reason for another step time, in ms; negative is time saved."""

    name: str
    ms: float

    @property
    def signed(self) -> str:
        """Whole ms with their sign; what rounds to nothing has none."""
        return f"{self.ms:+,.0f}" if round(self.ms) else "0"


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """What stands between two runs' mean steps, over the steps that both took and measured.

    - ``less_attention_ms``: the planner's work relative to base budgets, applied to the baseline's
      computing time.
    - ``waiting_ms``, ``rest_ms``: the differences of these parts.
    - ``machine_ms``: the rest of the difference of computing times. The same work took longer or
      shorter, or was predicted wrongly.
    - ``speedup_interval``: 95 % interval of the ratio of total times, by resampling pairs of steps;
      None for fewer than six pairs.
    - ``machine_spread``: how much computing time against the work varies from step to step: half
      the range of the middle half, over the median, for the run of the two in which it is larger.
    """

    baseline: TimeSplit
    run: TimeSplit
    less_attention_ms: float
    waiting_ms: float
    rest_ms: float
    machine_ms: float
    machine_spread: float
    speedup_interval: tuple[float, float] | None

    @property
    def changes(self) -> tuple[Change, ...]:
        """From the baseline's step to the run's: computing, waiting, the rest, noise."""
        return (
            Change(
                "less attention" if self.less_attention_ms <= 0 else "more attention",
                self.less_attention_ms,
            ),
            Change("less waiting" if self.waiting_ms <= 0 else "more waiting", self.waiting_ms),
            Change("optimizer, gradients", self.rest_ms),
            Change("noise", self.machine_ms),
        )

    @property
    def speedup_on_an_even_machine(self) -> float:
        """The ratio of mean steps, had the machine taken equally long for equal work."""
        return self.baseline.step_ms / (self.run.step_ms - self.machine_ms)

    @property
    def noisy(self) -> bool:
        """Whether the machine had a say in the result."""
        limit = NOISY_MACHINE_SHARE
        return abs(self.machine_ms) > limit * self.baseline.step_ms or self.machine_spread > limit


def split_time(steps: Sequence[StepRecord]) -> TimeSplit | None:
    """Where the mean step's time went; None where no step was measured whole."""
    parts = np.array([_parts(step) for step in steps if _is_known(step)])
    if not len(parts):
        return None
    compute_ms, waiting_ms, rest_ms = parts.mean(axis=0).tolist()
    return TimeSplit(
        steps=len(parts), compute_ms=compute_ms, waiting_ms=waiting_ms, rest_ms=rest_ms
    )


def explain(pairs: Sequence[tuple[StepRecord, StepRecord]]) -> Explanation | None:
    """Compare runs by (baseline's step, the run's step) of the same samples.

    Returns:
        None where no pair was measured whole.
    """
    known = [pair for pair in pairs if all(map(_is_known, pair))]
    before, after = (split_time([pair[side] for pair in known]) for side in (0, 1))
    if before is None or after is None:
        return None
    work = np.array([_work(new) / _work(old) for old, new in known])
    old_ms = np.array([old.compute_ms for old, _ in known])
    less_attention_ms = float((old_ms * (work - 1.0)).mean())
    return Explanation(
        baseline=before,
        run=after,
        less_attention_ms=less_attention_ms,
        waiting_ms=after.waiting_ms - before.waiting_ms,
        rest_ms=after.rest_ms - before.rest_ms,
        machine_ms=after.compute_ms - before.compute_ms - less_attention_ms,
        machine_spread=max(_spread([old for old, _ in known]), _spread([new for _, new in known])),
        speedup_interval=_interval(
            np.array([old.iteration_ms for old, _ in known]),
            np.array([new.iteration_ms for _, new in known]),
        ),
    )


def _is_known(step: StepRecord) -> bool:
    return None not in (step.iteration_ms, step.compute_ms, step.schedule_ms)


def _parts(step: StepRecord) -> tuple[float, float, float]:
    assert step.iteration_ms is not None
    assert step.compute_ms is not None and step.schedule_ms is not None
    # The schedule of a step lies within it, but for the clocks of hosts.
    schedule_ms = min(max(step.schedule_ms, step.compute_ms), step.iteration_ms)
    compute_ms = min(step.compute_ms, schedule_ms)
    return compute_ms, schedule_ms - compute_ms, step.iteration_ms - schedule_ms


def _work(step: StepRecord) -> float:
    return 1.0 if step.predicted.work_ratio is None else step.predicted.work_ratio


def _spread(steps: Sequence[StepRecord]) -> float:
    """Spread of measured over predicted computing times, where both are known."""
    ratios = [
        sum(step.measured_rank_ms) / sum(step.predicted_rank_ms)
        for step in steps
        if step.measured_rank_ms and step.predicted_rank_ms and sum(step.predicted_rank_ms) > 0.0
    ]
    if not ratios:
        return 0.0
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return float((high - low) / 2.0 / middle) if middle > 0.0 else 0.0


def _interval(old_ms: np.ndarray, new_ms: np.ndarray) -> tuple[float, float] | None:
    if len(old_ms) < _LEAST_PAIRS_FOR_INTERVAL:
        return None
    from scipy.stats import bootstrap

    found = bootstrap(
        (old_ms, new_ms),
        lambda old, new, axis: old.sum(axis=axis) / new.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)
