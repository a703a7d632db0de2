# SPDX-License-Identifier: Apache-2.0
"""Predicts a job under several block sizes, budgets, micro-batches and context groups.

Everything is counted or predicted by the code that plans training; nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.cost.memory import StageMemory
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.cost.work_model import features
from sparsebalance_megatron.learn.even_stages import EvenStages, even_stages
from sparsebalance_megatron.learn.prediction import Workload, planned_memory
from sparsebalance_megatron.plan.job import Job, check_cp_sizes, default_max_cp_size, whole_parts
from sparsebalance_megatron.plan.step_plan import PlanError, StepPlan
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.variants import RANKS_PER_NODE, workload


@dataclass(frozen=True, kw_only=True)
class AdviceInputs:
    """A model on some GPUs, and the samples it trains on.

    ``job``: of one micro-batch, whose ranks share none. ``shape`` names the tensor-parallel size.
    ``batches``: lengths in tokens of global batches in order, alike in size. ``costs``: block size
    -> cost model, without recomputation. ``layer_budgets``: of layers that keep theirs in every
    choice. ``seq_length``: the longest sample that training takes; None stands for the longest of
    the batches.
    """

    job: Job
    shape: ModelShape
    tied_embeddings: bool
    batches: tuple[tuple[int, ...], ...]
    costs: Callable[[int], CostModel]
    selection: str
    layer_budgets: str | None = None
    seq_length: int | None = None
    recompute_all: bool = False
    recompute_attention: bool = False

    @property
    def gpus(self) -> int:
        job = self.job
        return job.data_parallel_size * job.pipeline_stages * self.shape.tensor_parallel_size


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Settings that the user may choose. ``micro_batches``: per rank and step, as Megatron counts
    them."""

    block_size: int
    base_budget: int
    micro_batches: int
    context_parallel_size: int


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """Predictions of a choice; means over the steps.

    ``dense_tokens_share``: of tokens in documents whose blocks all fit the base budget, so that
    their attention is dense anyway. ``router_share``: of the compute time, what selecting takes.
    ``bubble_share``: of the GPUs' time within a step, what no micro-batch fills.
    ``speedup_over_dense``: the time of the same job with dense attention and no router, over this
    one's. ``stages``: memory of every pipeline stage in the fullest of the steps.
    """

    choice: Choice
    dense_tokens_share: float
    router_share: float
    step_ms: float
    tokens_per_second_per_gpu: float
    bubble_share: float
    speedup_over_dense: float
    coverage_prior: float | None
    stages: tuple[StageMemory, ...]

    @property
    def fullest_bytes(self) -> float:
        """Memory of the stage that needs most."""
        return max(stage.total_bytes for stage in self.stages)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Outlooks in the order of the choices, and why others have none."""

    outlooks: tuple[Outlook, ...]
    left_out: tuple[str, ...]
    cost_source: str


def advise(
    inputs: AdviceInputs,
    choices: Sequence[Choice],
    progress: Callable[[Sequence[Choice]], Iterable[Choice]] = iter,
) -> Advice:
    """The outlook of every choice that makes a job.

    Args:
        progress: shows how far it is while it gives the choices.

    Raises:
        WorkloadError: none does.
    """
    outlooks: list[Outlook] = []
    left_out: dict[str, list[Choice]] = {}
    for choice in progress(choices):
        try:
            outlooks.append(_outlook(inputs, choice))
        except (ConfigError, PlanError, WorkloadError) as error:
            left_out.setdefault(str(error), []).append(choice)
    reasons = tuple(f"{_named(those)}: {reason}" for reason, those in left_out.items())
    if not outlooks:
        raise WorkloadError(f"no choice makes a job: {reasons[0]}")
    source = inputs.costs(choices[0].block_size).source
    return Advice(outlooks=tuple(outlooks), left_out=reasons, cost_source=source)


def evened(inputs: AdviceInputs, choice: Choice) -> EvenStages | None:
    """Layers per stage that make a choice's steps shorter; see :func:`.even_stages`."""
    return even_stages(_workload(inputs, choice))


def _named(choices: Sequence[Choice]) -> str:
    """Settings that choices have in common."""
    named = {
        "block size {}": {choice.block_size for choice in choices},
        "budget {}": {choice.base_budget for choice in choices},
        "{} micro-batches": {choice.micro_batches for choice in choices},
        "context parallel {}": {choice.context_parallel_size for choice in choices},
    }
    common = [name.format(*values) for name, values in named.items() if len(values) == 1]
    return ", ".join(common or [f"{len(choices)} choices"])


def _outlook(inputs: AdviceInputs, choice: Choice) -> Outlook:
    sparse = _workload(inputs, choice)
    blocks = -(-max(map(max, inputs.batches)) // choice.block_size)
    dense = replace(
        sparse,
        policy=replace(sparse.policy, base_budget=blocks, layer_budgets=None, tuning="off"),
        cost=_without_router(sparse.cost),
    )
    plans, dense_plans = ([step.plan for step in each.planned_steps()] for each in (sparse, dense))
    step_ms, dense_ms = (
        sum(plan.expectation.makespan_ms for plan in each) for each in (plans, dense_plans)
    )
    job = inputs.job
    busy_ms = sum(float(plan.expectation.times_2RPVM.sum()) for plan in plans)
    dense_L, cost = sparse.policy.dense_L(job.layers), inputs.costs(choice.block_size)
    router_ms = sum(_router_ms(cost, int((~dense_L).sum()), plan) for plan in plans)
    lengths = np.concatenate(inputs.batches)
    is_dense = lengths <= choice.block_size * choice.base_budget
    coverages = [plan.expectation.coverage_mean for plan in plans]
    known = [coverage for coverage in coverages if coverage is not None]
    return Outlook(
        choice=choice,
        dense_tokens_share=float(lengths[is_dense].sum() / lengths.sum()),
        router_share=router_ms / busy_ms,
        step_ms=step_ms / len(plans),
        tokens_per_second_per_gpu=float(lengths.sum()) / (step_ms / 1e3) / inputs.gpus,
        bubble_share=1.0 - busy_ms / (job.data_parallel_size * job.pipeline_stages * step_ms),
        speedup_over_dense=dense_ms / step_ms,
        coverage_prior=float(np.mean(known)) if known else None,
        stages=planned_memory(
            plans,
            job,
            inputs.shape,
            selection=inputs.selection,
            block_size=choice.block_size,
            dense_L=dense_L,
            tied_embeddings=inputs.tied_embeddings,
            sequence_parallel=True,
            optimizer_ranks=job.data_parallel_size // choice.context_parallel_size,
            recompute_all=inputs.recompute_all,
            recompute_attention=inputs.recompute_attention,
        ),
    )


def _workload(inputs: AdviceInputs, choice: Choice) -> Workload:
    """All batches as training plans them by default.

    The token cap is training's: samples per micro-batch times the sequence length.

    Raises:
        ConfigError: if the samples do not fill the micro-batches evenly, or ranks cannot share.
    """
    size, ranks = choice.context_parallel_size, inputs.job.data_parallel_size
    max_cp_size = default_max_cp_size(ranks, size, RANKS_PER_NODE)
    check_cp_sizes(ranks, size, max_cp_size)
    sizes = {"micro-batches": choice.micro_batches, "data-parallel ranks": ranks // size}
    samples = whole_parts(len(inputs.batches[0]), "--global-batch", sizes)
    longest = inputs.seq_length or max(map(max, inputs.batches))
    cost = inputs.costs(choice.block_size).with_recompute(
        full=inputs.recompute_all, attention_only=inputs.recompute_attention
    )
    return workload(
        inputs.batches,
        job=replace(inputs.job, micro_batches=choice.micro_batches, context_parallel_size=size),
        config=SparseBalanceConfig(
            block_size=choice.block_size,
            base_budget=choice.base_budget,
            layer_budgets=inputs.layer_budgets,
        ),
        cap_tokens=-(-samples * longest // size),
        max_cp_size=max_cp_size,
        cost=cost,
        longest_tokens=longest,
    )


def _without_router(cost: CostModel) -> CostModel:
    nothing = {Part.ROUTER: (0.0,) * len(cost.forward_ms[Part.ROUTER])}
    return replace(
        cost, forward_ms={**cost.forward_ms, **nothing}, backward_ms={**cost.backward_ms, **nothing}
    )


def _router_ms(cost: CostModel, layers: int, plan: StepPlan) -> float:
    """Selecting blocks, forward and backward, on all ranks and layers of a step."""
    forward, backward = (cost.coefficients_ms(Part.ROUTER, each) for each in Direction)
    return layers * sum(
        float(
            (forward + backward)
            @ features(each.lengths_tokens, 1, block_size=cost.block_size, work=cost.work)
        )
        for each in plan.micro_batches
    )
