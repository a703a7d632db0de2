# SPDX-License-Identifier: Apache-2.0
"""What workloads are predicted to take, in time and in memory.

Shape legend: U segments.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.cost.memory import StageMemory, TokensHeld, stage_memory
from sparsebalance_megatron.cost.model import StageScales, counted_rates, training_flops
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.layer_budgets import DENSE
from sparsebalance_megatron.plan.bounds import step_bounds
from sparsebalance_megatron.plan.budgets.allowed import feasible_range
from sparsebalance_megatron.plan.pipeline.orders import most_tokens_in_flight
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan
from sparsebalance_megatron.predict.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A workload over all its steps; means unless said otherwise.

    Attributes:
        bound_ratio: step time over the lower bound of the same samples.
        coverage_mean: by the prior; None where nothing is known.
        work_ratio: work over that at base budgets.
        plan_ms: of one core, median.
        bubble_share: of the GPUs' time within a step, what no micro-batch fills.
        utilisation: operations of the model, recomputation left out, over what the devices could
            do in that time; None where their peak is not known.
        dense_tokens_share: of tokens in documents that layers at the base budget attend to densely.
        stages: memory of every pipeline stage in the step that needs most of it.
        stages_at_most: likewise, with every micro-batch at the token cap.
    """

    makespan_ms: float
    bound_ratio: float
    coverage_mean: float | None
    work_ratio: float
    plan_ms: float
    step_ms: tuple[float, ...]
    tokens_per_second_per_gpu: float
    utilisation: float | None
    bubble_share: float
    dense_tokens_share: float
    stages: tuple[StageMemory, ...]
    stages_at_most: tuple[StageMemory, ...]


def predict(workload: Workload, *, watch: Callable[[], object] = lambda: None) -> Outcome:
    """Plan all steps and sum them up; ``watch`` is called after each.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    steps = []
    for step in workload.planned_steps():
        steps.append(step)
        watch()
    plans, job, settings = [step.plan for step in steps], workload.job, workload.plan_settings
    expected = [plan.expectation for plan in plans]
    step_ms = np.array([each.makespan_ms for each in expected])
    ratios = step_ms / [each.lower_bound_ms for each in expected]
    coverage = [each.coverage_mean for each in expected if each.coverage_mean is not None]
    busy_ms, all_ms = sum(float(each.times_2RPVM.sum()) for each in expected), float(step_ms.sum())
    lengths = np.concatenate(workload.batches)
    alike = replace(settings, config=replace(settings.config, layer_budgets=None))
    dense_S = alike.dense_LS(1, lengths)[0] | workload.is_dense
    rates, block_size = counted_rates(workload.cost.device), settings.config.block_size
    peak = rates and rates.flops_per_ms * workload.gpus * all_ms
    flops = [flops_of(plan, shape=workload.memory.shape, block_size=block_size) for plan in plans]
    return Outcome(
        makespan_ms=float(step_ms.mean()),
        bound_ratio=float(ratios.mean()),
        coverage_mean=float(np.mean(coverage)) if coverage else None,
        work_ratio=float(np.mean([each.work_ratio for each in expected])),
        plan_ms=float(np.median([step.plan_ms for step in steps])),
        step_ms=tuple(step_ms.tolist()),
        tokens_per_second_per_gpu=float(lengths.sum() / (all_ms / 1e3) / workload.gpus),
        utilisation=sum(flops) / peak if peak else None,
        # Rounding may leave less than nothing where all are busy.
        bubble_share=max(
            0.0, 1.0 - busy_ms / (job.data_parallel_size * job.pipeline_stages * all_ms)
        ),
        dense_tokens_share=float(lengths[dense_S].sum() / lengths.sum()),
        stages=memory_of_steps(workload, plans),
        stages_at_most=memory_at_most(workload),
    )


def flops_of(plan: StepPlan, *, shape: ModelShape, block_size: int) -> float:
    """Operations of the model in a step, forward and backward, without recomputation."""
    flops = 0.0
    for each in plan.micro_batches:
        dense_LS = np.arange(len(each.samples)) < each.dense_documents_L[:, None]
        flops += training_flops(
            shape,
            layers=len(each.budgets_LS),
            lengths_tokens_S=each.lengths_tokens,
            budgets_LS=np.where(dense_LS, np.inf, each.budgets_LS),
            block_size=block_size,
        )
    return flops


def unhideable_steps(workload: Workload) -> int:
    """Steps with a sample that no placement hides, at the least budgets the policy allows."""
    job, settings = replace(workload.job, context_parallel_size=1), workload.plan_settings
    scales = StageScales.ones(job.pipeline_stages, job.virtual_stages)
    found = 0
    for batch in workload.dealt_batches:
        dense_LS = settings.dense_LS(job.layers, batch)
        costs = step_costs(batch, job, workload.cost, scales, dense_LS)
        floor_LS = feasible_range(costs, workload.coverage, settings).floor_LS
        bounds = step_bounds(costs.sample_ms(floor_LS), costs, settings.max_cp_size)
        found += bool(bounds.unhideable_S.any())
    return found


def memory_of_steps(workload: Workload, plans: Sequence[StepPlan]) -> tuple[StageMemory, ...]:
    """Memory of every stage in the step that needs most of it."""
    steps = []
    for plan in plans:
        most_L = np.max([_most_L(workload, each) for each in plan.micro_batches], axis=0)
        steps.append(_stages(workload, most_L, _tokens_held(workload, plan)))
    return tuple(
        max(of_stage, key=lambda each: each.total_bytes) for of_stage in zip(*steps, strict=True)
    )


def memory_at_most(workload: Workload) -> tuple[StageMemory, ...]:
    """Memory of every stage with micro-batches at the token cap, whatever the samples.

    Lists are those of base budgets, or of all blocks where tuning may raise budgets; none where
    every document is dense.
    """
    job, plan_settings = workload.job, workload.plan_settings
    config = plan_settings.config
    cap = float(plan_settings.max_tokens_per_micro_batch)
    longest_blocks = min(
        math.ceil(plan_settings.max_cp_size * cap / config.block_size), workload.coverage.max_blocks
    )
    # In whole groups of an interleaved schedule: others are refused when they are planned.
    groups = -(-job.micro_batches // job.micro_batches_multiple_of)
    whole = replace(job, micro_batches=groups * job.micro_batches_multiple_of)
    in_flight_P = most_tokens_in_flight(whole.graph.order, np.full(whole.micro_batches, cap))
    if config.max_segments > 1:
        ahead_P = config.max_segments - 1 + np.arange(job.pipeline_stages, 0, -1)
        in_flight_P = cap * np.minimum(job.micro_batches, ahead_P)
    held = TokensHeld(
        in_flight_P=tuple((in_flight_P / job.virtual_stages).tolist()),
        largest=cap,
        longest=cap if config.max_segments > 1 else 0.0,
    )
    base_L = plan_settings.base_L(job.layers)
    budgets_L = np.minimum(base_L if config.tuning == "off" else DENSE, longest_blocks)
    if not config.attends_by_lists:
        dense_L = plan_settings.dense_blocks_L(job.layers) >= longest_blocks
        budgets_L = np.where(dense_L, 0, budgets_L)
    budgets_L = np.broadcast_to(budgets_L, base_L.shape)
    return _stages(workload, budgets_L, held)


def _most_L(workload: Workload, micro_batch: MicroBatchPlan) -> np.ndarray:
    """Largest budget in each layer; 0 of samples that are attended to without lists."""
    budgets_LS = micro_batch.budgets_LS
    if not workload.plan_settings.config.attends_by_lists:
        listed_LS = np.arange(budgets_LS.shape[1]) >= micro_batch.dense_documents_L[:, None]
        budgets_LS = budgets_LS * listed_LS
    return np.asarray(budgets_LS.max(axis=1))


def _stages(workload: Workload, budgets_L: np.ndarray, held: TokensHeld) -> tuple[StageMemory, ...]:
    """Memory of every stage at one budget for each layer."""
    job, plan_settings, shape = workload.job, workload.plan_settings, workload.memory.shape
    block_size = plan_settings.config.block_size
    dense_L = plan_settings.dense_L(job.layers)
    of_sparse = workload.cost.work.list_entries_per_token(
        heads=shape.num_attention_heads,
        groups=shape.num_query_groups,
        block_size=block_size,
        budget_blocks=int(budgets_L[~dense_L].max(initial=0)),
    )
    # A dense layer lists all blocks for each block of queries and KV head.
    of_dense = shape.num_query_groups * int(budgets_L[dense_L].max(initial=0)) / block_size
    entries_L = np.where(budgets_L == 0, 0.0, np.where(dense_L, of_dense, of_sparse))
    found = []
    for stage, chunks in enumerate(job.stage_layers):
        own = [layer for chunk in chunks for layer in chunk]
        lists = float(entries_L[own].mean()) if own else 0.0
        model = replace(workload.memory, selected_blocks_per_token=lists)
        found.append(stage_memory(model, stage, held))
    return tuple(found)


def _tokens_held(workload: Workload, plan: StepPlan) -> TokensHeld:
    job, block_size = workload.job, workload.plan_settings.config.block_size
    tokens_RM = plan.rank_tokens_RM()
    positions, cut = tokens_RM.shape[1], [each for each in plan.micro_batches if each.segments > 1]
    order = replace(job, micro_batches=positions).graph.order
    in_flight_RP, largest = most_tokens_in_flight(order, tokens_RM), tokens_RM.max()
    if cut:
        ranks = [plan.for_rank(rank).micro_batches for rank in range(plan.data_parallel_size)]
        tokens_RU = [
            np.concatenate([each.segment_tokens(block_size) / each.cp_size for each in own])
            for own in ranks
        ]
        orders = [
            plan.schedule_of(rank)(job.pipeline_stages, positions, 1) for rank in range(len(ranks))
        ]
        in_flight_RP = np.array(list(map(most_tokens_in_flight, orders, tokens_RU)))
        largest = np.concatenate(tokens_RU).max()
    return TokensHeld(
        in_flight_P=tuple((in_flight_RP.max(axis=0) / job.virtual_stages).tolist()),
        largest=float(largest),
        longest=max((each.tokens / each.cp_size for each in cut), default=0.0),
    )
