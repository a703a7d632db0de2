# SPDX-License-Identifier: Apache-2.0
"""The placements that a batching policy chooses from."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.plan.placement import balance
from sparsebalance_megatron.plan.placement.search import improve
from sparsebalance_megatron.plan.step_plan import PlanError
from sparsebalance_megatron.plan.step_problem import StepProblem


def candidates(problem: StepProblem) -> dict[Batching, balance.Placement]:
    """Named placements, the simplest first.

    Raises:
        PlanError: the policy names an unknown batching, or none of its placements exists.
    """
    batching = problem.policy.batching
    simple: tuple[Batching, ...] = tuple(_METHODS) if batching == "makespan" else (batching,)
    found: dict[Batching, balance.Placement] = {}
    failures: list[PlanError] = []
    for name in simple:
        if name not in _METHODS:
            raise PlanError(f"batching {name!r} is not one of {', '.join(_METHODS)}, makespan")
        try:
            found[name] = _METHODS[name](problem)
        except PlanError as error:
            failures.append(error)
    if not found:
        try:
            return {"arrival": _arrival(problem)}
        except PlanError:
            raise failures[-1] from None
    if batching == "makespan":
        start = found.get("latency") or next(iter(found.values()))
        found["makespan"] = improve(
            start,
            problem.costs,
            problem.expected_2SC,
            cap_tokens=problem.policy.max_tokens_per_slot,
            plan_ms=problem.policy.plan_ms,
        )
    return found


def _arrival(problem: StepProblem) -> balance.Placement:
    return balance.arrival(problem.lengths_tokens, problem.job, problem.policy.max_tokens_per_slot)


def _length(problem: StepProblem) -> balance.Placement:
    return balance.balanced(
        problem.costs.lengths_tokens_S,
        problem.lengths_tokens,
        problem.job,
        problem.policy.max_tokens_per_slot,
    )


def _latency(problem: StepProblem) -> balance.Placement:
    return problem.balanced_by(problem.expected_LS)


_METHODS: Mapping[Batching, Callable[[StepProblem], balance.Placement]] = {
    "arrival": _arrival,
    "length": _length,
    "latency": _latency,
}
