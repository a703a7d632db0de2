# SPDX-License-Identifier: Apache-2.0
"""One way to run a step, and what it takes; the shortest becomes the plan."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebalance_megatron.config import Batching
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.step_problem import StepProblem


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidate:
    """Samples in their places.

    Attributes:
        problem: of as many positions as the arrangement has, which may be fewer than the job's.
        batching: how samples were placed.
        makespan_ms: predicted at the expected budgets, which no tuning but the paper's makes
            longer; rounded, so that equal steps tie.
    """

    problem: StepProblem
    batching: Batching
    arrangement: Arrangement
    makespan_ms: float

    @classmethod
    def of(
        cls, problem: StepProblem, arrangement: Arrangement, batching: Batching = "makespan"
    ) -> Candidate:
        """The candidate of an arrangement."""
        ms_R = problem.budgets.makespans_ms(problem.expected_LS, arrangement)
        return cls(
            problem=problem,
            batching=batching,
            arrangement=arrangement,
            makespan_ms=rounded_ms(ms_R.max()),
        )


def shortest(*candidates: Candidate | None) -> Candidate:
    """The candidate that takes least; the first of equals.

    Raises:
        ValueError: there is none.
    """
    return min(filter(None, candidates), key=lambda each: each.makespan_ms)
