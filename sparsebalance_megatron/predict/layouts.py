# SPDX-License-Identifier: Apache-2.0
"""Looks for the layout and settings in which a job is predicted to be fastest.

1. A choice is a layout, a block size and a budget. Those that make no job are left out, with the
   reason.
2. Choices whose memory at the token cap exceeds that of a GPU are left out; where none is left,
   the one that needs least stays. No step is planned for that.
3. Choices are ranked: first those whose base budgets cover no less than the reference's, then the
   rest; within both the faster first. The reference is the choice with the default block size and
   budget, or else the one that covers most. Of many, only the first in the rank over two steps go
   on, with the fastest of the rest.
4. Those are predicted over all steps, with sparse and with dense attention, and ranked again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.cost.table import CostTableError
from sparsebalance_megatron.plan.step_plan import PlanError
from sparsebalance_megatron.predict.lengths import WorkloadError
from sparsebalance_megatron.predict.memory import memory_at_most
from sparsebalance_megatron.predict.outcome import Outcome, Watch, predict
from sparsebalance_megatron.predict.rows import best_row, dense_row
from sparsebalance_megatron.predict.workload import Workload

_SAME_COVERAGE = 1e-6
_FINALISTS = 6
"""Choices that are predicted over all steps."""
_FIRST_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings that the user may choose; ``micro_batches`` as Megatron counts them."""

    tensor_parallel_size: int
    pipeline_stages: int
    context_parallel_size: int
    expert_parallel_size: int
    micro_batches: int
    block_size: int
    base_budget: int


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A choice that fits, with what it takes with sparse and with dense attention."""

    choice: Choice
    workload: Workload
    sparse: Outcome
    dense: Outcome

    @property
    def speedup_over_dense(self) -> float:
        """Time with dense attention, placed alike, over that of this choice."""
        return self.dense.makespan_ms / self.sparse.makespan_ms


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Predictions, best first; coverage of the reference; what is left out and why; whether any
    choice fits."""

    predictions: tuple[Prediction, ...]
    reference_coverage: float
    left_out: tuple[str, ...]
    fits: bool

    @property
    def best(self) -> Prediction:
        """The fastest at no less coverage than the reference."""
        return self.predictions[0]

    def covers_less(self, prediction: Prediction) -> bool:
        """Whether base budgets cover less than those of the reference."""
        return prediction.sparse.coverage_base < self.reference_coverage - _SAME_COVERAGE


def advise(
    choices: Sequence[Choice],
    workload_of: Callable[[Choice], Workload],
    gpu_memory_gib: float,
    progress: Callable[[int], Watch] = lambda _: lambda: None,
) -> Advice:
    """Predict every choice that makes a job and fits.

    Args:
        progress: gets the number of steps to plan, and returns what to call after each.

    Raises:
        WorkloadError: no choice makes a job.
    """
    left_out: dict[str, list[Choice]] = {}
    jobs: list[tuple[float, Choice, Workload]] = []
    for choice in choices:
        try:
            workload = workload_of(choice)
            stages = memory_at_most(workload)
        except (ConfigError, CostTableError, PlanError, WorkloadError) as error:
            left_out.setdefault(str(error), []).append(choice)
            continue
        gibibytes = max(stage.total_bytes for stage in stages) / GIBIBYTE
        jobs.append((gibibytes, choice, workload))
    if not jobs:
        raise WorkloadError(f"no choice makes a job: {_reasons(left_out)[0]}")
    fitting = [job for job in jobs if job[0] <= gpu_memory_gib]
    tried = fitting or [min(jobs, key=lambda job: job[0])]
    too_large = [choice for _, choice, workload in jobs if all(choice != job[1] for job in tried)]
    if too_large:
        reason = f"at the token cap more than {gpu_memory_gib:g} GiB"
        left_out[reason] = too_large
    screened = len(tried) > _FINALISTS
    steps = len(tried[0][2].batches)
    first_steps = min(_FIRST_STEPS, steps) * len(tried) if screened else 0
    watch = progress(first_steps + 2 * steps * min(len(tried), _FINALISTS))
    if screened:
        tried = _screened(tried, left_out, watch)
    predictions = []
    for _, choice, workload in tried:
        sparse, dense = best_row(workload).of(workload), dense_row(workload).of(workload)
        try:
            found = [predict(each, watch=watch) for each in (sparse, dense)]
        except PlanError as error:
            left_out.setdefault(str(error), []).append(choice)
            continue
        predictions.append(
            Prediction(choice=choice, workload=sparse, sparse=found[0], dense=found[1])
        )
    if not predictions:
        raise WorkloadError(f"no choice can be planned: {_reasons(left_out)[0]}")
    reference = _reference_coverage([(each.choice, each.sparse) for each in predictions])
    advice = Advice(
        predictions=tuple(predictions),
        reference_coverage=reference,
        left_out=_reasons(left_out),
        fits=bool(fitting),
    )
    ranked = sorted(
        predictions, key=lambda each: (advice.covers_less(each), each.sparse.makespan_ms)
    )
    return replace(advice, predictions=tuple(ranked))


def _screened(
    jobs: Sequence[tuple[float, Choice, Workload]],
    left_out: dict[str, list[Choice]],
    watch: Watch,
) -> list[tuple[float, Choice, Workload]]:
    """The first in the rank over the first steps, and the fastest of those that cover less."""
    found = []
    for job in jobs:
        _, choice, workload = job
        few = replace(workload, batches=workload.batches[:_FIRST_STEPS])
        try:
            found.append((job, predict(best_row(few).of(few), watch=watch)))
        except PlanError as error:
            left_out.setdefault(str(error), []).append(choice)
    reference = _reference_coverage([(job[1], outcome) for job, outcome in found])

    def rank(each: tuple[object, Outcome]) -> tuple[bool, float]:
        return each[1].coverage_base < reference - _SAME_COVERAGE, each[1].makespan_ms

    found.sort(key=rank)
    kept = [job for job, _ in found[:_FINALISTS]]
    less = [each for each in found[_FINALISTS:] if rank(each)[0]]
    if less and not any(rank(each)[0] for each in found[:_FINALISTS]):
        kept[-1] = less[0][0]
    reason = f"slower in the first {_FIRST_STEPS} steps than those above"
    slower = [job[1] for job, _ in found if all(job is not each for each in kept)]
    if slower:
        left_out[reason] = slower
    return kept


def _reference_coverage(found: Sequence[tuple[Choice, Outcome]]) -> float:
    defaults = SparseBalanceConfig()
    wanted = (defaults.block_size, defaults.base_budget)
    usual = [
        outcome.coverage_base
        for choice, outcome in found
        if (choice.block_size, choice.base_budget) == wanted
    ]
    every = [outcome.coverage_base for _, outcome in found]
    return min(usual) if usual else max(every, default=0.0)


def _reasons(left_out: dict[str, list[Choice]]) -> tuple[str, ...]:
    return tuple(f"{named(choices)}: {reason}" for reason, choices in left_out.items())


def named(choices: Sequence[Choice]) -> str:
    """Settings that choices have in common, or how many they are."""
    names = {
        "TP {}": "tensor_parallel_size",
        "PP {}": "pipeline_stages",
        "CP {}": "context_parallel_size",
        "EP {}": "expert_parallel_size",
        "{} micro-batches": "micro_batches",
        "block size {}": "block_size",
        "budget {}": "base_budget",
    }
    common = []
    for text, field in names.items():
        values = {getattr(choice, field) for choice in choices}
        if len(values) == 1:
            common.append(text.format(*values))
    of_all = f"{len(choices)} choices" if len(choices) > 1 else ""
    return ", ".join([*([of_all] if of_all else []), *common])
