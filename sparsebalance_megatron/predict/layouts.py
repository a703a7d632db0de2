# SPDX-License-Identifier: Apache-2.0
"""Looks for the layout and settings in which a job is predicted to be fastest.

1. A choice is a layout, a block size and a budget. Those that make no job are left out, with the
   reason.
2. Choices whose memory at the token cap exceeds that of a GPU are left out. No step is planned for
   that.
3. The others are predicted, with sparse and with dense attention.
4. They are ranked: first those whose base budgets cover no less than the reference's, then the
   rest; within both the faster first. The reference is the choice with the default block size and
   budget, or else the one that covers most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
    """Predictions, best first; how many of them cover no less than the reference; what is left out
    and why."""

    predictions: tuple[Prediction, ...]
    reference_coverage: float
    left_out: tuple[str, ...]

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
        WorkloadError: no choice makes a job, or none fits.
    """
    left_out: dict[str, list[Choice]] = {}
    fitting: list[tuple[Choice, Workload]] = []
    smallest: tuple[float, Choice] | None = None
    for choice in choices:
        try:
            workload = workload_of(choice)
            stages = memory_at_most(workload)
        except (ConfigError, CostTableError, PlanError, WorkloadError) as error:
            left_out.setdefault(str(error), []).append(choice)
            continue
        gibibytes = max(stage.total_bytes for stage in stages) / GIBIBYTE
        if smallest is None or gibibytes < smallest[0]:
            smallest = gibibytes, choice
        if gibibytes <= gpu_memory_gib:
            fitting.append((choice, workload))
        else:
            reason = f"at the token cap they need more than {gpu_memory_gib:g} GiB"
            left_out.setdefault(reason, []).append(choice)
    if not fitting:
        raise WorkloadError(_nothing_fits(smallest, gpu_memory_gib, _reasons(left_out)))
    watch = progress(2 * sum(len(workload.batches) for _, workload in fitting))
    predictions = []
    for choice, workload in fitting:
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
    return _ranked(predictions, _reasons(left_out))


def _nothing_fits(
    smallest: tuple[float, Choice] | None, gpu_memory_gib: float, reasons: tuple[str, ...]
) -> str:
    if smallest is None:
        return f"no choice makes a job: {reasons[0]}"
    gibibytes, choice = smallest
    return (
        f"no choice fits {gpu_memory_gib:g} GiB with every micro-batch at the token cap; the "
        f"smallest needs {gibibytes:.0f} GiB: {named([choice])}. Raise --tp, --pp, --cp or --ep, "
        "use --recompute full, or lower --max-tokens-per-micro-batch"
    )


def _ranked(predictions: Sequence[Prediction], left_out: tuple[str, ...]) -> Advice:
    defaults = SparseBalanceConfig()
    wanted = (defaults.block_size, defaults.base_budget)
    usual = [
        each.sparse.coverage_base
        for each in predictions
        if (each.choice.block_size, each.choice.base_budget) == wanted
    ]
    reference = min(usual) if usual else max(each.sparse.coverage_base for each in predictions)
    advice = Advice(predictions=(), reference_coverage=reference, left_out=left_out)
    ordered = sorted(
        predictions, key=lambda each: (advice.covers_less(each), each.sparse.makespan_ms)
    )
    return Advice(predictions=tuple(ordered), reference_coverage=reference, left_out=left_out)


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
