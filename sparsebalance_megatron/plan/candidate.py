# SPDX-License-Identifier: Apache-2.0
"""One way to run a step, and what it takes; the shortest becomes the plan."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.policy import TunedBudgets
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.segments.segmented_times import segmented_times
from sparsebalance_megatron.plan.step_problem import StepProblem


def step_ms(problem: StepProblem, where: Arrangement, budgets_LS: np.ndarray) -> float:
    """Makespan of placed samples at these budgets, rounded so that equal steps tie."""
    if where.segment_starts_blocks:
        ms_R = segmented_times(problem.costs, where, budgets_LS)[1]
    else:
        ms_R = problem.budgets.makespans_ms(budgets_LS, where)
    return rounded_ms(ms_R.max())


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """Samples in their places with tuned budgets.

    Attributes:
        problem: of as many positions as the arrangement has, which may be fewer than the job's.
        batching: how samples were placed.
        makespan_ms: predicted; rounded.
    """

    problem: StepProblem
    batching: Batching
    arrangement: Arrangement
    tuned: TunedBudgets
    makespan_ms: float

    @classmethod
    def of(
        cls,
        problem: StepProblem,
        arrangement: Arrangement,
        tuned: TunedBudgets | None = None,
        batching: Batching = "makespan",
    ) -> Candidate:
        """The candidate of an arrangement; its budgets are tuned where none are given."""
        tuned = tuned or problem.tuned_where(arrangement)
        return cls(
            problem=problem,
            batching=batching,
            arrangement=arrangement,
            tuned=tuned,
            makespan_ms=step_ms(problem, arrangement, tuned.budgets_LS),
        )


def shortest(*candidates: Candidate | None) -> Candidate:
    """The candidate that takes least; the first of equals.

    Raises:
        ValueError: there is none.
    """
    return min(filter(None, candidates), key=lambda each: each.makespan_ms)
