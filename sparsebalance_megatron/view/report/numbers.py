# SPDX-License-Identifier: Apache-2.0
"""One run in numbers, or two runs of the same samples, and why one is faster."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.cost.model import counted_rates
from sparsebalance_megatron.layer_budgets import ALL_DENSE
from sparsebalance_megatron.learn.measurement import StepFigures
from sparsebalance_megatron.log.reader import RunLog, read_run_log
from sparsebalance_megatron.log.records import RunHeader, StepRecord
from sparsebalance_megatron.plan.job import Job

_WARM_UP_STEPS = 5
_LEAST_PAIRS_FOR_INTERVAL = 6
_RESAMPLES = 2000
_CONFIDENCE = 0.95

_SAME_MODEL_AND_DATA = ("layers", "seq_length", "global_batch_size", "counts", "sources")
"""Fields without which a comparison says nothing of the plugin."""
_OF_THE_JOB = ("layers", "pipeline_stages", "virtual_stages")
_OF_THE_HEADER = (
    *("seq_length", "global_batch_size", "counts", "sources"),
    *("device", "cost_source", "megatron_core", "torch"),
)
_OF_NO_ACCOUNT = frozenset({"log_dir", "log_megabytes", "dry_run", "cost_table"})
_LONGEST_VALUE = 60

Pair = tuple[StepRecord, StepRecord]
"""(baseline's step, the run's step) of the same iteration."""


@dataclass(frozen=True)
class TimeSplit:
    """Parts of the mean step's time, in ms; the three add up to it.

    ``compute_ms``: own times of forwards and backwards, the mean over all stages of all ranks.
    ``waiting_ms``: the rest of the time until the last of them has finished its last backward.
    ``rest_ms``: everything after that: reducing gradients, the optimizer, reading, logging.
    """

    compute_ms: float
    waiting_ms: float
    rest_ms: float

    @property
    def step_ms(self) -> float:
        return self.compute_ms + self.waiting_ms + self.rest_ms


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Two runs' mean steps, over the steps that both took and measured.

    ``speedup_interval``: 95 % interval of the ratio of total times, by resampling pairs of steps;
    None for fewer than six pairs.
    """

    baseline: TimeSplit
    run: TimeSplit
    speedup_interval: tuple[float, float] | None


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """One run in numbers; None where nothing was measured.

    All but the losses leave out the warm-up. ``split``: where the mean step's time goes.
    ``figures``: over steps, the mean of coverages and the median of other
    :class:`.measurement.StepFigures`.
    ``lockstep_ranks``: how many ranks waited for one another in every layer; busy times leave this
    out, and ``split`` counts it as waiting. ``utilisation``: operations of the model over what the
    devices could do, None where their peak is not known. ``window_steps``: within which samples
    changed places. ``tokens_variation``: standard deviation over mean of tokens a step;
    ``tokens_correlation``: of a step and the one before.
    """

    steps: int
    warm_up_steps: int
    iteration_ms_median: float | None
    loss_first: float | None
    loss_last: float | None
    figures: Mapping[str, float | None]
    split: TimeSplit | None = None
    lockstep_ranks: int = 1
    tokens_per_second_per_gpu: float | None = None
    utilisation: float | None = None
    window_steps: int = 1
    tokens_variation: float | None = None
    tokens_correlation: float | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two runs over the same samples.

    ``speedup``: the baseline's time over the run's, of all steps together. It and the explanation
    of the difference are None unless both runs saw the same number of tokens in every step, or in
    every window.
    ``differences``: settings that the runs do not share, one phrase each.
    """

    baseline: RunSummary
    sparse_balance: RunSummary
    speedup: float | None
    problems: tuple[str, ...]
    explanation: Explanation | None = None
    differences: tuple[str, ...] = ()


class Beside(NamedTuple):
    """Another run over the same samples, over the baseline; and the run over it.

    ``kind``: what it has of the run: "placement" of mode exact, "attention" too of base budgets for
    all that are placed by the plan; None of others.
    """

    kind: str | None
    over_baseline: Comparison
    run_over: Comparison


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """A run in numbers, over a baseline if there is one, and beside others by their names."""

    run: RunSummary
    comparison: Comparison | None = None
    beside: Mapping[str, Beside] = field(default_factory=dict)

    @property
    def runs(self) -> dict[str, RunSummary]:
        """All runs by their names, in the order of columns."""
        runs = {"baseline": self.comparison.baseline} if self.comparison else {}
        return (
            runs
            | {name: of.run_over.baseline for name, of in self.beside.items()}
            | {"run": self.run}
        )

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """The run over each of the others."""
        over = {"the baseline": self.comparison} if self.comparison else {}
        return over | {name: each.run_over for name, each in self.beside.items()}

    @property
    def problems(self) -> list[str]:
        """What the logs lack, each once; of a run alone its log has them."""
        every = [problem for each in self.comparisons.values() for problem in each.problems]
        return list(dict.fromkeys(every))


def numbers_of(run: RunLog, baseline: RunLog | None, beside: Sequence[Path] = ()) -> Numbers:
    """A run in numbers; others ``beside`` it by the names of their directories, whole where two are
    alike."""
    if baseline is None:
        return Numbers(run=summarize(run.steps, run.header))
    names = [directory.name for directory in beside]
    found = {}
    for name, directory in zip(names, beside, strict=True):
        log = read_run_log(directory)
        config = log.header.config if log.header else {}
        kind, is_placed = None, config.get("batching") == "makespan"
        if is_placed and config.get("tuning") == "off":
            kind = "placement" if is_dense(config) else "attention"
        other = Beside(kind, compare(baseline, log), compare(log, run))
        found[name if names.count(name) == 1 else str(directory)] = other
    comparison = compare(baseline, run)
    return Numbers(run=comparison.sparse_balance, comparison=comparison, beside=found)


def is_dense(config: Mapping[str, Any]) -> bool:
    """Whether a run of these settings attends densely in all layers."""
    return ALL_DENSE in str(config.get("layer_budgets"))


def compare(baseline: RunLog, balanced: RunLog) -> Comparison:
    """Both runs in numbers, and how much faster the second is; see :func:`differences`."""
    differing = differences(baseline, balanced)
    problems = [*baseline.problems, *balanced.problems]
    if len(baseline.steps) != len(balanced.steps):
        problems.append(
            f"{len(baseline.steps)} steps in {baseline.directory}, {len(balanced.steps)} in "
            f"{balanced.directory}: last losses are not of the same step"
        )
    windows = whole_windows(_common(balanced, baseline))
    pairs = [pair for window in windows for pair in window]
    odd = [pair for window in windows if not _alike(window) for pair in window]
    if odd:
        problems.append(
            f"token counts differ in {len(odd)} of {len(pairs)} steps, first in iteration "
            f"{odd[0][0].iteration}: other samples, so steps are not compared one by one"
        )
        pairs = []
    steps_ms = np.array(
        [(old.iteration_ms, new.iteration_ms) for old, new in pairs], dtype=np.float64
    ).reshape(-1, 2)
    before_ms, after_ms = steps_ms[np.isfinite(steps_ms).all(axis=1)].sum(axis=0).tolist()
    before, after = (summarize(log.steps, log.header) for log in (baseline, balanced))
    return Comparison(
        baseline=before,
        sparse_balance=after,
        speedup=before_ms / after_ms if after_ms else None,
        problems=tuple(problems),
        explanation=explain(pairs),
        differences=differing,
    )


def summarize(steps: Sequence[StepRecord], header: RunHeader | None = None) -> RunSummary:
    after = settled(steps)
    losses = list(window_losses(steps).values())
    tokens = np.array([step.tokens for step in after], dtype=np.float64)
    varying = len(tokens) > 2 and tokens[1:].std() > 0.0 < tokens[:-1].std()
    times_ms = [step.iteration_ms for step in after if step.iteration_ms]
    rates = counted_rates(header.device) if header else None
    gpu_ms = sum(times_ms) * ((header and header.world_size) or 0)
    flops = 1e12 * sum(step.tflops or 0.0 for step in after if step.iteration_ms)
    return RunSummary(
        steps=len(steps),
        warm_up_steps=len(steps) - len(after),
        iteration_ms_median=median(times_ms) if times_ms else None,
        loss_first=losses[0] if losses else None,
        loss_last=losses[-1] if losses else None,
        figures={each.name: _over_steps(after, each.name) for each in fields(StepFigures)},
        split=split_time(after),
        lockstep_ranks=header.job.lockstep_ranks if header else 1,
        tokens_per_second_per_gpu=tokens_per_second(after, header),
        utilisation=flops / (gpu_ms * rates.flops_per_ms) if rates and flops * gpu_ms else None,
        window_steps=max((step.window.steps for step in steps if step.window), default=1),
        tokens_variation=float(tokens.std() / tokens.mean()) if tokens.any() else None,
        tokens_correlation=(float(np.corrcoef(tokens[:-1], tokens[1:])[0, 1]) if varying else None),
    )


def window_losses(steps: Sequence[StepRecord]) -> dict[int, float]:
    """Mean loss of every whole window, or of a step without one, by its last iteration. The loss of
    a step of a window follows its lengths, that of the window does not."""
    return {
        window[-1][0].iteration: fmean(known)
        for window in whole_windows([(step,) for step in steps])
        if (known := [step.lm_loss for (step,) in window if step.lm_loss is not None])
    }


def tokens_per_second(steps: Sequence[StepRecord], header: RunHeader | None) -> float | None:
    """Tokens a second of a GPU over steps of known time; None where the log names no GPUs."""
    gpu_ms = sum(step.iteration_ms or 0.0 for step in steps) * ((header and header.world_size) or 0)
    tokens = sum(step.tokens for step in steps if step.iteration_ms)
    return tokens / (gpu_ms / 1e3) if gpu_ms else None


def _over_steps(steps: Sequence[StepRecord], name: str) -> float | None:
    known = [getattr(step.figures, name) for step in steps]
    values = [value for value in known if isinstance(value, int | float)]
    if not values:
        return None
    return fmean(values) if name.startswith("coverage") else median(values)


def settled(steps: Sequence[StepRecord]) -> Sequence[StepRecord]:
    """The steps after the warm-up: the first five, or a fifth of a run shorter than 25 steps."""
    return steps[min(_WARM_UP_STEPS, len(steps) // 5) :]


def paired(run: RunLog, baseline: RunLog) -> list[Pair]:
    """The steps after the warm-up in which both saw as many tokens, or in whose window."""
    windows = whole_windows(_common(run, baseline))
    return [pair for window in windows if _alike(window) for pair in window]


def _alike(window: Sequence[Pair]) -> bool:
    return sum(old.tokens for old, _ in window) == sum(new.tokens for _, new in window)


def whole_windows[Steps: tuple[StepRecord, ...]](common: Sequence[Steps]) -> list[list[Steps]]:
    """The same iterations of some runs, those together that begin and end with a window in every
    run. A step without a window is one by itself; windows of which steps are missing are left
    out."""
    found: list[list[Steps]] = []
    window: list[Steps] | None = None
    for steps in common:
        places = [each.window for each in steps if each.window]
        if all(place.number == 0 for place in places):
            window = []
        elif window and window[-1][0].iteration + 1 != steps[0].iteration:
            window = None
        if window is not None:
            window.append(steps)
            if all(place.number == place.steps - 1 for place in places):
                found.append(window)
                window = None
    return found


def _common(run: RunLog, baseline: RunLog) -> list[Pair]:
    old = {step.iteration: step for step in settled(baseline.steps)}
    return [(old[new.iteration], new) for new in settled(run.steps) if new.iteration in old]


def split_time(steps: Sequence[StepRecord]) -> TimeSplit | None:
    """Split the mean step's time; None where no step was measured whole."""
    parts = time_parts(steps)
    return _mean(parts[np.isfinite(parts).all(axis=1)])


def explain(pairs: Sequence[Pair]) -> Explanation | None:
    """Compare runs by steps of the same samples; None where no pair was measured whole."""
    parts = np.stack([time_parts([pair[side] for pair in pairs]) for side in (0, 1)])
    whole = np.isfinite(parts).all(axis=(0, 2))
    before, after = (_mean(each) for each in parts[:, whole])
    if before is None or after is None:
        return None
    return Explanation(
        baseline=before, run=after, speedup_interval=ratio_interval(*parts[:, whole].sum(axis=2))
    )


def time_parts(steps: Sequence[StepRecord]) -> np.ndarray:
    """ms of computing, waiting and the rest of every step; NaN where it was not measured whole."""
    known = [
        (step.iteration_ms, step.figures.computing_ms_measured, step.figures.makespan_ms_measured)
        for step in steps
    ]
    iteration_ms, compute_ms, schedule_ms = np.array(known, dtype=np.float64).reshape(-1, 3).T
    # The schedule of a step lies within it, but for the clocks of hosts.
    schedule_ms = np.minimum(np.maximum(schedule_ms, compute_ms), iteration_ms)
    compute_ms = np.minimum(compute_ms, schedule_ms)
    return np.stack([compute_ms, schedule_ms - compute_ms, iteration_ms - schedule_ms], axis=1)


def _mean(parts: np.ndarray) -> TimeSplit | None:
    return TimeSplit(*parts.mean(axis=0).tolist()) if len(parts) else None


def ratio_interval(before_ms: np.ndarray, after_ms: np.ndarray) -> tuple[float, float] | None:
    """95 % interval of the ratio of total times, by resampling pairs of steps; None of too few."""
    if len(before_ms) < _LEAST_PAIRS_FOR_INTERVAL:
        return None
    from scipy.stats import bootstrap

    found = bootstrap(
        (before_ms, after_ms),
        lambda old, new, axis: old.sum(axis=axis) / new.sum(axis=axis),
        paired=True,
        vectorized=True,
        n_resamples=_RESAMPLES,
        confidence_level=_CONFIDENCE,
        method="percentile",
        random_state=np.random.default_rng(0),
    ).confidence_interval
    return float(found.low), float(found.high)


def differences(baseline: RunLog, run: RunLog) -> tuple[str, ...]:
    """ "NAME A -> B", from the baseline to the run, of every setting that differs; none without
    headers.

    Raises:
        ConfigError: the runs trained other models or data.
    """
    if baseline.header is None or run.header is None:
        return ()
    before, after = (_settings(header) for header in (baseline.header, run.header))
    differing = {
        name: f"{name.replace('_', ' ')} {before.get(name, 'none')} -> {after.get(name, 'none')}"
        for name in before | after
        if before.get(name, "none") != after.get(name, "none")
    }
    other = [text for name, text in differing.items() if name in _SAME_MODEL_AND_DATA]
    if other:
        raise ConfigError(
            f"{baseline.directory} and {run.directory} trained other models or data: "
            f"{'; '.join(other)}. Compare runs of one model over the same samples"
        )
    return tuple(differing.values())


def _settings(header: RunHeader) -> dict[str, str]:
    """What may differ between runs, by name, as short text."""
    job = header.job
    values = {name: getattr(job, name) for name in (*_OF_THE_JOB, *(f.name for f in fields(Job)))}
    values |= {name: getattr(header, name) for name in _OF_THE_HEADER}
    values |= {name: each for name, each in header.config.items() if name not in _OF_NO_ACCOUNT}
    texts = {name: "none" if value is None else str(value) for name, value in values.items()}
    return {
        name: text if len(text) <= _LONGEST_VALUE else f"{text[: _LONGEST_VALUE - 3]}..."
        for name, text in texts.items()
    }
