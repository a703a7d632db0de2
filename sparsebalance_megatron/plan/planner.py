# SPDX-License-Identifier: Apache-2.0
"""Lengths, coverage and costs to the plan of one step; pure, so every rank computes the same.

The shortest of all :mod:`.candidates` has its budgets tuned (:mod:`.budgets`) and is the plan.
"""

from dataclasses import replace
from itertools import pairwise, starmap

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.bounds import segmented_bound_ms, step_bounds
from sparsebalance_megatron.plan.budgets.policy import (
    TunedBudgets,
    in_order,
    leading_LS,
    step_problem,
    tune,
    with_leading,
)
from sparsebalance_megatron.plan.candidates import best_candidate
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.segments import PlacedSegments
from sparsebalance_megatron.plan.step_plan import Expectation, MicroBatchPlan, StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs, StepProblem


def plan_step(step: int, inputs: PlanInputs) -> StepPlan:
    """The plan of one step: place the samples, then tune their budgets.

    Batching ``makespan`` keeps the shortest of all :mod:`.candidates`, and ``StepPlan.batching``
    names what won. ``arrival``, ``length`` and ``latency`` mean just that, except that a balanced
    packing which the token cap defeats gives way to arrival order where that fits.

    A placement that is given stays as it is, whatever its tokens, and only its budgets are chosen.

    Raises:
        PlanError: no placement exists, or the inputs contradict one another.
    """
    problem = step_problem(inputs)
    best = best_candidate(problem)
    where = best.arrangement
    tuned = tune(with_leading(best.problem, where), where)
    problem = problem.with_positions(best.problem.job.micro_batches)
    if best.problem.job.data_parallel_size < problem.job.data_parallel_size:
        where = Arrangement.of_placement(where.samples, problem.job.context_parallel_size)
    order_I = in_order(problem, where, tuned.dense_LS)
    leading = leading_LS(tuned.dense_LS, order_I, where.micro_batch_of_S)
    tuned = replace(tuned, dense_LS=leading)
    plan = StepPlan(
        step=step,
        data_parallel_size=inputs.job.data_parallel_size,
        micro_batches=_micro_batches(problem, where, tuned, order_I.tolist()),
        expectation=expectation(problem, where, tuned),
        batching=best.batching,
    )
    cap_tokens = inputs.plan_settings.max_tokens_per_micro_batch
    if inputs.placement is not None:
        cap_tokens = max(cap_tokens, *(micro_batch.tokens for micro_batch in plan.micro_batches))
    plan.validate(
        inputs.lengths_tokens,
        problem.job,
        replace(inputs.plan_settings, max_tokens_per_micro_batch=cap_tokens),
    )
    return plan


def _micro_batches(
    problem: StepProblem, arrangement: Arrangement, tuned: TunedBudgets, samples: list[int]
) -> tuple[MicroBatchPlan, ...]:
    """Every micro-batch on its first rank, with its budgets cut from one array of all.

    Args:
        samples: of all micro-batches, one after another.
    """
    placed_LS = np.ascontiguousarray(tuned.budgets_LS[:, samples])
    placed_LS.flags.writeable = False
    places, firsts = np.unique(arrangement.micro_batch_of_S[samples], return_index=True)
    dense_ML = np.add.reduceat(tuned.dense_LS[:, samples], firsts, axis=1, dtype=np.int32).T
    dense_ML = np.ascontiguousarray(dense_ML)
    dense_ML.flags.writeable = False
    starts = arrangement.segment_starts_blocks
    micro_batches: list[MicroBatchPlan] = []
    parts = starmap(slice, pairwise([*firsts.tolist(), len(samples)]))
    for place, held, dense_L in zip(places.tolist(), parts, dense_ML, strict=True):
        rank, position = divmod(place, problem.job.micro_batches)
        micro_batches.append(
            MicroBatchPlan(
                samples=tuple(samples[held]),
                lengths_tokens=tuple(problem.lengths_tokens[sample] for sample in samples[held]),
                budgets_LS=placed_LS[:, held],
                rank=rank,
                position=position,
                cp_size=int(arrangement.cp_sizes_RM[rank, position]),
                segment_starts_blocks=starts[rank][position] if starts else (0,),
                dense_documents_L=dense_L,
            )
        )
    return tuple(micro_batches)


def expectation(problem: StepProblem, arrangement: Arrangement, tuned: TunedBudgets) -> Expectation:
    """Times, balance and coverage of placed samples with these budgets."""
    costs = replace(problem.costs, dense_LS=tuned.dense_LS)
    tuned_2SX = costs.sample_ms(tuned.budgets_LS)
    if arrangement.segment_starts_blocks:
        placed = PlacedSegments(costs, arrangement)
        ms_2UP, times_2RPVM = placed.ms(tuned.budgets_LS), placed.own_ms_2RPVM(tuned.budgets_LS)
        makespans_E = makespans_ms(placed.times(ms_2UP))
        end_E = np.cumsum(list(map(sum, placed.segments_EM)))
        of_groups = np.split(ms_2UP.swapaxes(1, 2), end_E[:-1], axis=2)
        segment_ms = tuple(ms for ms in of_groups for _ in range(costs.job.lockstep_ranks))
    else:
        segment_ms = ()
        times_2RPVM = costs.own_ms_2RPVM(tuned_2SX, arrangement)
        makespans_E = makespans_ms(costs.micro_batch_ms(tuned_2SX, arrangement))
    times_2RPVM.flags.writeable = False
    tuned_work, base_work = (
        each.job.places * each.constant_2C.sum() + sample_2SX.sum()
        for each, sample_2SX in ((costs, tuned_2SX), (problem.costs, problem.base_2SX))
    )
    coverage_mean, coverage_min = _coverage(problem, tuned.budgets_LS)
    return Expectation(
        makespan_ms=float(makespans_E.max()),
        lower_bound_ms=_lower_bound_ms(problem),
        rank_makespan_ms=tuple(np.repeat(makespans_E, costs.job.lockstep_ranks).tolist()),
        times_2RPVM=times_2RPVM,
        coverage_mean=coverage_mean,
        coverage_min=coverage_min,
        work_ratio=float(tuned_work / base_work) if base_work else 1.0,
        samples_cut=int(tuned.cut_S.sum()),
        samples_raised=int(tuned.raised_S.sum()),
        segment_ms=segment_ms,
    )


def _lower_bound_ms(problem: StepProblem) -> float:
    """A bound for all placements of these samples at all budgets, cp_sizes, segments and
    numbers of positions that are allowed."""
    settings, bounded = problem.plan_settings, problem.of_groups
    limit, segmented_ms = 1, np.inf
    if settings.plans_cp_sizes:
        limit, bounded = settings.max_cp_size, problem
    if settings.plans_segments(problem.job):
        # A step of lockstep groups runs in segments or with planned cp_sizes, not both.
        if problem.job.lockstep_ranks == 1 or limit == 1:
            return segmented_bound_ms(problem, limit)
        segmented_ms = segmented_bound_ms(problem)
    if problem.plans_positions:
        # Every position costs something, and a bound of one position holds for any number.
        bounded = bounded.with_positions(1)
    costs = bounded.costs
    floor_2SX = costs.sample_ms(bounded.allowed.floor_LS)
    bound_ms = step_bounds(floor_2SX, costs, limit).bound_ms * float(costs.slowness_RP.min())
    return min(bound_ms, segmented_ms)


def _coverage(problem: StepProblem, budgets_LS: np.ndarray) -> tuple[float | None, float | None]:
    """Mean and minimum over the layers and samples whose curves are known."""
    if not problem.coverage.observed_LU.any():
        return None, None
    coverage_LS = problem.coverage.coverage_LS(problem.costs.blocks_S, budgets_LS)
    known = coverage_LS[~np.isnan(coverage_LS)]
    return (float(known.mean()), float(known.min())) if len(known) else (None, None)
