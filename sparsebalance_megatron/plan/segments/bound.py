# SPDX-License-Identifier: Apache-2.0
"""What no plan with segments can beat: no placement, no cuts, at no budgets that are allowed.

Shape legend: S samples of a global batch, R data-parallel ranks, P pipeline stages; a leading 2:
forward and backward.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.step_problem import StepProblem


def segmented_bound_ms(problem: StepProblem) -> float:
    """Lower bound in ms on a step whose micro-batches run in segments or in one piece.

    The first operation of stage p is a forward that has passed the stages before it, and after its
    last operation, a backward, they still run theirs. Both belong to a segment, or to a whole
    micro-batch, and so to no fewer tokens than a segment must hold or the shortest sample has: that
    is the way to the stage and back. Between them the stage does all work of its rank, which
    cutting makes no less.

    *Mean.* The slowest rank does at least the mean work of all ranks.

    *Sample.* The rank of a sample does the work of that sample, and, since no micro-batch is empty,
    of at least M - 1 others.
    """
    costs, job = problem.costs, problem.job
    work_2SP = costs.sample_ms(problem.budgets.allowed.floor_LS)
    work_SP = work_2SP[0] + work_2SP[1]
    constant_P = job.micro_batches * (costs.constant_2C[0] + costs.constant_2C[1])
    least_tokens = min(problem.policy.segment_tokens, int(costs.lengths_tokens_S.min()))
    passing_P = least_tokens * (costs.token_2C[0] + costs.token_2C[1])
    way_P = np.cumsum(passing_P) - passing_P
    mean_P = work_SP.sum(axis=0) / job.data_parallel_size
    least_SP = np.sort(work_SP, axis=0)[: job.micro_batches]
    others_SP = least_SP.sum(axis=0) - np.minimum(work_SP, least_SP[-1])
    bound_P = np.maximum(mean_P, (work_SP + others_SP).max(axis=0)) + constant_P + way_P
    return float(bound_P.max() * costs.slowness_RP.min())
