# SPDX-License-Identifier: Apache-2.0
"""Lengths, coverage and costs to the plan of one step; pure, so every rank computes the same.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.plan.budgets.tune import TunedBudgets
from sparsebalance_megatron.plan.expectation import expectation
from sparsebalance_megatron.plan.placement.arrangement import Arrangement
from sparsebalance_megatron.plan.placement.balance import Placement, arrival, balanced
from sparsebalance_megatron.plan.placement.search import improve
from sparsebalance_megatron.plan.placement.search_effort import (
    SHARE_OF_STEP,
    SHARE_OF_STEP_FOR_WIDTHS,
)
from sparsebalance_megatron.plan.placement.wide_moves import Rules
from sparsebalance_megatron.plan.placement.wide_search import improve_widths
from sparsebalance_megatron.plan.placement.wide_start import wide_start
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, PlanError, StepPlan
from sparsebalance_megatron.plan.step_problem import PlanInputs, StepProblem

_CLOSE = 1.04
"""Of two placements before tuning: by how much tuning may turn which one is faster."""
_SIMPLE: tuple[Batching, ...] = ("arrival", "length", "latency")


def plan_step(step: int, inputs: PlanInputs) -> StepPlan:
    """The plan of one step: place the samples, then tune their budgets.

    Batching ``makespan`` keeps the best of arrival order, token balance, latency balance and the
    latter improved by search, by simulated makespan at the budgets expected after tuning;
    ``StepPlan.batching`` names the winner. ``arrival``, ``length`` and ``latency`` mean just that,
    except that a balanced packing which the token cap defeats gives way to arrival order where that
    fits.

    Every slot is as wide as the job's context-parallel size, unless the policy lets widths be
    planned and batching is ``makespan``; then those that fit the samples are used where they give
    the shorter step. Tuning ``anchor`` has no widths to choose: the anchor is a slot's latency.

    Raises:
        PlanError: no placement exists, or the inputs contradict one another.
    """
    problem = StepProblem.of(inputs)
    batching, arrangement, tuned = _best_candidate(problem)
    plan = StepPlan(
        step=step,
        data_parallel_size=inputs.job.data_parallel_size,
        slots=_slots(problem, arrangement, tuned.budgets_LS),
        expectation=expectation(problem, arrangement, tuned),
        batching=batching,
    )
    plan.validate(inputs.lengths_tokens, inputs.job, inputs.policy)
    return plan


def _best_candidate(problem: StepProblem) -> tuple[Batching, Arrangement, TunedBudgets]:
    if not problem.policy.plans_widths:
        batching, placement, tuned = _best_of_groups(problem.of_groups)
        width = problem.job.context_parallel_size
        return batching, Arrangement.of_groups(placement, width), tuned
    return _best_widths(problem)


def _best_widths(problem: StepProblem) -> tuple[Batching, Arrangement, TunedBudgets]:
    """The best of planned widths and, where their slots may have them, of equal ones.

    Widths are planned at budgets between those expected and the least allowed: slots that the step
    waits for end below what is expected of all. Two plans are tuned only where it is not clear
    before which one wins.

    Raises:
        PlanError: no placement of the samples exists.
    """
    costs, policy = problem.costs, problem.policy
    groups = problem.of_groups
    found: list[tuple[float, Batching, Arrangement]] = []
    try:
        batching, placement = _best_placement(groups)
        equal = Arrangement.of_groups(placement, problem.job.context_parallel_size)
        if _gives_blocks(equal, costs.blocks_S):
            ms_R = problem.makespans_ms(equal, problem.expected_2SC)
            found.append((_rounded(ms_R.max()), batching, equal))
    except PlanError:  # the cap may ask for wider slots
        pass
    rules = Rules(cap_tokens=problem.cap_tokens, max_width=policy.max_context_parallel)
    search_2SC = (problem.expected_2SC + costs.sample_ms(problem.budgets.allowed.floor_LS)) / 2
    try:
        start = wide_start(search_2SC.sum(axis=(0, 2)), costs, rules)
    except PlanError:
        if not found:
            raise
    else:
        plan_ms = _plan_ms(problem, start, SHARE_OF_STEP_FOR_WIDTHS)
        planned = improve_widths(start, costs, search_2SC, rules=rules, plan_ms=plan_ms)
        ms_R = problem.makespans_ms(planned, problem.expected_2SC)
        found.append((_rounded(ms_R.max()), "makespan", planned))
    least_ms = min(ms for ms, _, _ in found)
    close = [each for each in found if each[0] <= _CLOSE * least_ms]
    tuned = [(problem.tuned_where(where), name, where) for _, name, where in close]
    if len(tuned) == 1:
        ((budgets, name, where),) = tuned
        return name, where, budgets

    def tuned_ms(candidate: tuple[TunedBudgets, Batching, Arrangement]) -> float:
        budgets, _, where = candidate
        ms_R = problem.makespans_ms(where, costs.sample_ms(budgets.budgets_LS))
        return _rounded(ms_R.max())

    budgets, name, where = min(tuned, key=tuned_ms)
    return name, where, budgets


def _gives_blocks(arrangement: Arrangement, blocks_S: np.ndarray) -> bool:
    """Whether every rank of every slot gets a block."""
    return all(
        arrangement.width(rank, position) <= int(blocks_S[list(slot)].sum())
        for rank, slots in enumerate(arrangement.samples)
        for position, slot in enumerate(slots)
        if slot
    )


def _best_of_groups(problem: StepProblem) -> tuple[Batching, Placement, TunedBudgets]:
    """Only the winner is tuned, except where tuning towards an anchor decides who wins."""
    if problem.policy.tuning != "anchor":
        batching, placement = _best_placement(problem)
        return batching, placement, problem.tuned(placement)
    placements = _candidates(problem)
    tuned = {name: problem.tuned(where) for name, where in placements.items()}
    batching = min(
        placements,
        key=lambda name: _key(
            problem, placements[name], problem.costs.sample_ms(tuned[name].budgets_LS)
        ),
    )
    return batching, placements[batching], tuned[batching]


def _best_placement(problem: StepProblem) -> tuple[Batching, Placement]:
    """At the expected budgets."""
    placements = _candidates(problem)
    if len(placements) == 1:
        ((batching, placement),) = placements.items()
        return batching, placement
    batching = min(
        placements, key=lambda name: _key(problem, placements[name], problem.expected_2SC)
    )
    return batching, placements[batching]


def _key(problem: StepProblem, placement: Placement, sample_2SC: np.ndarray) -> tuple[float, float]:
    """Least makespan first, then least sum of the ranks' makespans, then the simplest."""
    ms_R = problem.makespans_ms(Arrangement(samples=placement), sample_2SC)
    return _rounded(ms_R.max()), _rounded(ms_R.sum())


def _candidates(problem: StepProblem) -> dict[Batching, Placement]:
    """Named placements, the simplest first.

    Raises:
        PlanError: the policy names an unknown batching, or none of its placements exists.
    """
    batching = problem.policy.batching
    simple: tuple[Batching, ...] = _SIMPLE if batching == "makespan" else (batching,)
    found: dict[Batching, Placement] = {}
    failures: list[PlanError] = []
    for name in simple:
        if name not in _SIMPLE:
            raise PlanError(f"batching {name!r} is not one of {', '.join(_SIMPLE)}, makespan")
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
        found["makespan"] = improve(
            start,
            problem.costs,
            problem.expected_2SC,
            cap_tokens=problem.cap_tokens,
            plan_ms=_plan_ms(problem, Arrangement(samples=start)),
        )
    return found


def _plan_ms(problem: StepProblem, start: Arrangement, share: float = SHARE_OF_STEP) -> float:
    """Ms of search: what the policy says, or a share of the step that the search begins with."""
    if problem.policy.plan_ms is not None:
        return problem.policy.plan_ms
    makespans_R = problem.makespans_ms(start, problem.expected_2SC)
    return share * _rounded(float(makespans_R.max()))


def _placement(batching: Batching, problem: StepProblem) -> Placement:
    lengths, job, cap = problem.lengths_tokens, problem.job, problem.cap_tokens
    match batching:
        case "arrival":
            return arrival(lengths, job, cap)
        case "length":
            return balanced(problem.costs.lengths_tokens_S, lengths, job, cap)
        case _:
            return problem.balanced_by(problem.expected_LS)


def _rounded(ms: float) -> float:
    """To nine digits: sums of the same times in another order are a tie."""
    return float(f"{ms:.8e}")


def _slots(
    problem: StepProblem, arrangement: Arrangement, budgets_LS: np.ndarray
) -> tuple[MicroBatchPlan, ...]:
    """Every slot on its first rank, with its budgets cut from one array of all."""
    samples = [sample for rank in arrangement.samples for slot in rank for sample in slot]
    placed_LS = np.ascontiguousarray(budgets_LS[:, samples])
    placed_LS.flags.writeable = False
    slots = []
    first = 0
    for rank, in_rank in enumerate(arrangement.samples):
        for position, slot in enumerate(in_rank):
            if not slot:
                continue
            slots.append(
                MicroBatchPlan(
                    samples=slot,
                    lengths_tokens=tuple(problem.lengths_tokens[sample] for sample in slot),
                    budgets_LS=placed_LS[:, first : first + len(slot)],
                    rank=rank,
                    position=position,
                    width=arrangement.width(rank, position),
                )
            )
            first += len(slot)
    return tuple(slots)
