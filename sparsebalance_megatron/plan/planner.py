# SPDX-License-Identifier: Apache-2.0
"""Lengths, coverage and costs to the plan of one step; pure, so every rank computes the same.

Forms of a step, by how they start and what is searched::

    starts (.search)                        in one piece                  in segments (.segments)
    order of arrival, balanced by tokens,   searched places and orders    cut, ordered, traded
    balanced by latency                     (.search)
    samples shared more or less eagerly     planned cp_sizes              cut and ordered
                                            (.planned_cp_sizes)
    rows of equal height, where ranks       rows on groups                cut alike in a row
    wait in every layer                     (.planned_rows)

Each of these is placed at expected budgets and becomes a :class:`.Candidate`. The shortest one has
its budgets tuned (:mod:`.budgets`) and is the plan.

Shape legend: U segments.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.bounds import segmented_bound_ms, step_bounds
from sparsebalance_megatron.plan.budgets.policy import TunedBudgets
from sparsebalance_megatron.plan.candidate import Candidate, shortest
from sparsebalance_megatron.plan.lockstep_times import own_times
from sparsebalance_megatron.plan.metrics import imbalance, rounded_ms
from sparsebalance_megatron.plan.planned_cp_sizes import best_cp_sizes
from sparsebalance_megatron.plan.planned_rows import best_rows
from sparsebalance_megatron.plan.search.annealing import searched
from sparsebalance_megatron.plan.search.balance import arrival, balanced
from sparsebalance_megatron.plan.search.lockstep_order import in_lockstep_order
from sparsebalance_megatron.plan.search_effort import SHARE_OF_STEP, SHARE_OF_STEP_FOR_PACKED
from sparsebalance_megatron.plan.segments.planned_segments import (
    LEAST_GAIN,
    segments_of_groups,
    segments_of_ranks,
    segments_of_shared,
)
from sparsebalance_megatron.plan.segments.segmented_times import segmented_times
from sparsebalance_megatron.plan.step_plan import Expectation, MicroBatchPlan, PlanError, StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs, StepProblem

_SIMPLE: tuple[Batching, ...] = ("arrival", "length", "latency")


def plan_step(step: int, inputs: PlanInputs) -> StepPlan:
    """The plan of one step: place the samples, then tune their budgets.

    Batching ``makespan`` keeps the best of arrival order, token balance, latency balance and the
    latter improved by search, by simulated makespan at the expected budgets;
    ``StepPlan.batching`` names the winner. ``arrival``, ``length`` and ``latency`` mean just
    that, except that a balanced packing which the token cap defeats gives way to arrival order
    where that fits.

    Where ranks run in lockstep, batching ``makespan`` places samples in rows
    (:mod:`.planned_rows`), and the step may have fewer micro-batches on every rank than the job.

    A placement that is given stays as it is, whatever its tokens, and only its budgets are chosen.

    Every micro-batch has the job's context-parallel size, unless the policy lets cp_sizes
    be planned and batching is ``makespan``; then those that fit the samples are used where they
    give the shorter step. Tuning ``anchor`` has no cp_sizes to choose: the anchor is a
    micro-batch's latency.

    Raises:
        PlanError: no placement exists, or the inputs contradict one another.
    """
    problem = StepProblem.of(inputs)
    best = _in_lockstep(problem) if problem.plans_rows else _apart(problem)
    tuned = best.problem.tuned(best.arrangement)
    plan = StepPlan(
        step=step,
        data_parallel_size=inputs.job.data_parallel_size,
        micro_batches=_micro_batches(best.problem, best.arrangement, tuned.budgets_LS),
        expectation=expectation(best, tuned),
        batching=best.batching,
    )
    cap_tokens = inputs.plan_settings.max_tokens_per_micro_batch
    if inputs.placement is not None:
        cap_tokens = max(cap_tokens, *(micro_batch.tokens for micro_batch in plan.micro_batches))
    plan.validate(
        inputs.lengths_tokens,
        best.problem.job,
        replace(inputs.plan_settings, max_tokens_per_micro_batch=cap_tokens),
    )
    return plan


def _in_lockstep(problem: StepProblem) -> Candidate:
    """The shortest step of ranks that wait for one another in every layer.

    Rows, or where there are none, or cp_sizes may be planned, what is best for ranks that wait for
    nobody, in lockstep order. Then the rows in segments.
    """
    try:
        blind = _candidates(problem.of_groups)
    except PlanError:
        blind = {}
    cp_size = problem.job.context_parallel_size
    found = []
    if rows := best_rows(problem.of_groups, blind.values()):
        where = Arrangement.of_groups(rows.arrangement.samples, cp_size)
        found.append(Candidate.of(problem.with_positions(rows.problem.job.micro_batches), where))
    if problem.plans_cp_sizes or not found:
        where = _apart(problem.in_one_piece).arrangement
        where = in_lockstep_order(where, problem.costs, problem.expected_2SC)
        found.append(Candidate.of(problem, where))
    if problem.plans_segments and (rows or not problem.plans_cp_sizes):
        # The first plan has no micro-batch that ranks share.
        found.append(segments_of_groups(found[0]))
    return shortest(*found)


def _apart(problem: StepProblem) -> Candidate:
    """The shortest step of ranks that wait for nobody in a layer.

    1. The best placement of micro-batches of equal cp_size, in one piece, at the expected budgets.
    2. Where segments may be planned, a placement in segments.
    3. The first one, or planned cp_sizes where those are shorter, or these in segments.
    """
    if problem.placement is not None:
        return _as_placed(problem, problem.placement)
    try:
        batching, placement = _best_placement(problem.of_groups)
    except PlanError:
        if not problem.plans_cp_sizes:
            raise
        # The cap may ask for micro-batches that more ranks share.
        return _cut_if_shorter(best_cp_sizes(problem, None), None, None)
    cuts = problem.plans_segments and problem.job.lockstep_ranks == 1
    cut = segments_of_ranks(problem, placement) if cuts else None
    equal = Arrangement.of_groups(placement, problem.job.context_parallel_size)
    if problem.plans_cp_sizes:
        whole = best_cp_sizes(problem, equal, batching)
    else:
        whole = Candidate.of(problem, equal, batching)
    return _cut_if_shorter(whole, cut, equal)


def _cut_if_shorter(
    whole: Candidate, cut: Candidate | None, equal: Arrangement | None
) -> Candidate:
    """A step in one piece, or in segments where those gain enough: of ranks alone, or of ranks that
    may share micro-batches."""
    problem, shared = whole.problem, None
    if problem.plans_segments and problem.plans_cp_sizes and problem.job.lockstep_ranks == 1:
        shared = segments_of_shared(problem, equal or whole.arrangement, cut)
    limit_ms = rounded_ms(LEAST_GAIN * whole.makespan_ms)
    found = [cut, shared]
    shorter = [each for each in found if each is not None and each.makespan_ms < limit_ms]
    return shortest(*shorter or [whole])


def _as_placed(problem: StepProblem, placement: Placement) -> Candidate:
    """A placement that the caller has made, with budgets for it.

    Raises:
        PlanError: it is not one of this job, or does not hold every sample once.
    """
    job, groups = problem.job, problem.job.groups
    shape = [len(rank) for rank in placement]
    if shape != [job.micro_batches] * groups.data_parallel_size:
        raise PlanError(
            f"placement: ranks have {shape} micro-batches, the job {groups.data_parallel_size} "
            f"ranks of {job.micro_batches}; context-parallel ranks are not counted"
        )
    placed = sorted(sample for rank in placement for micro_batch in rank for sample in micro_batch)
    if placed != list(range(len(problem.lengths_tokens))):
        raise PlanError(
            f"placement: must hold each of the {len(problem.lengths_tokens)} samples exactly once"
        )
    where = Arrangement.of_groups(placement, job.context_parallel_size)
    return Candidate.of(problem, where, "arrival")


def _best_placement(problem: StepProblem) -> tuple[Batching, Placement]:
    """The fastest placement at the expected budgets."""
    placements = _candidates(problem)
    if len(placements) == 1:
        ((batching, placement),) = placements.items()
        return batching, placement

    def key(name: Batching) -> tuple[float, float]:
        """Least makespan first, then least sum of the ranks' makespans, then the simplest."""
        where = Arrangement.of_groups(placements[name])
        ms_R = problem.makespans_ms(where, problem.expected_2SC)
        return rounded_ms(ms_R.max()), rounded_ms(ms_R.sum())

    batching = min(placements, key=key)
    return batching, placements[batching]


def _candidates(problem: StepProblem) -> dict[Batching, Placement]:
    """Named placements, the simplest first.

    Raises:
        PlanError: none of the policy's placements exists.
    """
    batching = problem.plan_settings.batching
    simple: tuple[Batching, ...] = _SIMPLE if batching == "makespan" else (batching,)
    found: dict[Batching, Placement] = {}
    failures: list[PlanError] = []
    for name in simple:
        try:
            found[name] = _placement(name, problem)
        except PlanError as error:
            failures.append(error)
    if not found:
        try:
            return {"arrival": _placement("arrival", problem)}
        except PlanError:
            raise failures[-1] from None
    if batching == "makespan":
        start = found.get("latency") or next(iter(found.values()))
        found["makespan"] = _searched(problem, start)
    return found


def _searched(problem: StepProblem, start: Placement) -> Placement:
    """The best orders first, then the search over places."""
    packed = len(problem.lengths_tokens) > problem.job.places
    share = SHARE_OF_STEP_FOR_PACKED if packed else SHARE_OF_STEP
    return searched(
        start,
        problem.costs,
        problem.expected_2SC,
        cap_tokens=problem.cap_tokens,
        plan_ms=problem.search_ms(Arrangement.of_groups(start), share),
    )


def _placement(batching: Batching, problem: StepProblem) -> Placement:
    lengths, job, cap = problem.lengths_tokens, problem.job, problem.cap_tokens
    match batching:
        case "arrival":
            return arrival(lengths, job, cap)
        case "length":
            return balanced(problem.costs.lengths_tokens_S, lengths, job, cap)
        case _:
            return problem.balanced_by(problem.expected_LS)


def _dense_first(problem: StepProblem, micro_batch: tuple[int, ...]) -> tuple[int, ...]:
    """Samples that most layers attend to densely first, so that these find them side by side; else
    in the order given. A caller's own placement keeps its order: the caller may have packed by
    it."""
    layers_S = problem.costs.dense_LS[:, list(micro_batch)].sum(axis=0)
    return tuple(micro_batch[each] for each in np.argsort(-layers_S, kind="stable"))


def _micro_batches(
    problem: StepProblem, arrangement: Arrangement, budgets_LS: np.ndarray
) -> tuple[MicroBatchPlan, ...]:
    """Every micro-batch on its first rank, with its budgets cut from one array of all."""
    reorders = problem.placement is None and not arrangement.segment_starts_blocks
    placed = [
        [
            _dense_first(problem, micro_batch)
            if reorders and arrangement.cp_size(rank, position) == 1
            else micro_batch
            for position, micro_batch in enumerate(in_rank)
        ]
        for rank, in_rank in enumerate(arrangement.samples)
    ]
    samples = [sample for rank in placed for micro_batch in rank for sample in micro_batch]
    placed_LS = np.ascontiguousarray(budgets_LS[:, samples])
    placed_LS.flags.writeable = False
    micro_batches = []
    first = 0
    for rank, in_rank in enumerate(placed):
        for position, micro_batch in enumerate(in_rank):
            if not micro_batch:
                continue
            lengths_tokens = tuple(problem.lengths_tokens[sample] for sample in micro_batch)
            micro_batches.append(
                MicroBatchPlan(
                    samples=micro_batch,
                    lengths_tokens=lengths_tokens,
                    budgets_LS=placed_LS[:, first : first + len(micro_batch)],
                    rank=rank,
                    position=position,
                    cp_size=arrangement.cp_size(rank, position),
                    segment_starts_blocks=(
                        arrangement.segment_starts_blocks[rank][position]
                        if arrangement.segment_starts_blocks
                        else (0,)
                    ),
                )
            )
            first += len(micro_batch)
    return tuple(micro_batches)


def expectation(plan: Candidate, tuned: TunedBudgets) -> Expectation:
    """Times, balance and coverage of a plan with these budgets."""
    problem, arrangement = plan.problem, plan.arrangement
    costs = problem.costs
    tuned_2SC = costs.sample_ms(tuned.budgets_LS)
    if arrangement.segment_starts_blocks:
        times_2RPVM, makespans_R, ms_2UP = segmented_times(costs, arrangement, tuned.budgets_LS)
        end_R = np.cumsum([sum(map(len, of_rank)) for of_rank in arrangement.segment_starts_blocks])
        segment_ms = tuple(np.split(ms_2UP.swapaxes(1, 2), end_R[:-1], axis=2))
    else:
        segment_ms = ()
        times_2RPVM = costs.micro_batch_ms(tuned_2SC, arrangement).by_micro_batch_2RPVM
        makespans_R = problem.budgets.makespans_ms(tuned.budgets_LS, arrangement)
    if costs.job.lockstep_ranks > 1:
        times_2RPVM = own_times(costs, times_2RPVM, arrangement)
    times_2RPVM.flags.writeable = False
    work_RPVM = times_2RPVM[0] + times_2RPVM[1]
    constant_ms = costs.job.places * (costs.constant_2C[0] + costs.constant_2C[1]).sum()
    tuned_work, base_work = (
        constant_ms + sum(sample_SC.sum() for sample_SC in sample_2SC)
        for sample_2SC in (tuned_2SC, costs.sample_ms(problem.budgets.allowed.base_LS))
    )
    coverage_mean, coverage_min = _coverage(problem, tuned.budgets_LS)
    return Expectation(
        makespan_ms=float(makespans_R.max()),
        lower_bound_ms=_lower_bound_ms(problem),
        rank_makespan_ms=tuple(makespans_R.tolist()),
        times_2RPVM=times_2RPVM,
        imbalance_micro_batches=imbalance(work_RPVM.sum(axis=(1, 2))),
        imbalance_rank_sums=imbalance(work_RPVM.sum(axis=(1, 2, 3))),
        imbalance_makespans=imbalance(makespans_R),
        coverage_mean=coverage_mean,
        coverage_min=coverage_min,
        work_ratio=float(tuned_work / base_work) if base_work else 1.0,
        samples_cut=int(tuned.cut_S.sum()),
        samples_raised=int(tuned.raised_S.sum()),
        samples_clamped=int(tuned.clamped_S.sum()),
        segment_ms=segment_ms,
    )


def _lower_bound_ms(problem: StepProblem) -> float:
    """A bound for all placements of these samples at all budgets, cp_sizes, segments and
    numbers of positions that are allowed."""
    limit = problem.plan_settings.max_context_parallel if problem.plans_cp_sizes else 1
    if problem.plans_segments and (problem.job.lockstep_ranks == 1 or limit == 1):
        return segmented_bound_ms(problem, limit)
    bounded = problem if problem.plans_cp_sizes else problem.of_groups
    if problem.plans_positions:
        # Every position costs something, and a bound of one position holds for any number.
        bounded = bounded.with_positions(1)
    costs = bounded.costs
    floor_2SC = costs.sample_ms(bounded.budgets.allowed.floor_LS)
    bound_ms = step_bounds(floor_2SC, costs, limit).bound_ms * float(costs.slowness_RP.min())
    # A step of lockstep groups runs in segments or with planned cp_sizes, not both.
    return min(bound_ms, segmented_bound_ms(problem)) if problem.plans_segments else bound_ms


def _coverage(problem: StepProblem, budgets_LS: np.ndarray) -> tuple[float | None, float | None]:
    """Mean and minimum over the layers and samples whose curves are known."""
    if not problem.budgets.coverage.observed_LU.any():
        return None, None
    coverage_LS = problem.budgets.coverage_LS(budgets_LS)
    known = coverage_LS[~np.isnan(coverage_LS)]
    return (float(known.mean()), float(known.min())) if len(known) else (None, None)
