# SPDX-License-Identifier: Apache-2.0
"""Lower bound of steps with segments over all placements, cuts and allowed budgets.

Shape legend: S samples of a global batch, R data-parallel ranks, P pipeline stages; a leading 2:
forward and backward.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.step_costs import TOKENS, dense_layers
from sparsebalance_megatron.plan.step_problem import StepProblem


def segmented_bound_ms(problem: StepProblem, max_cp_size: int = 1) -> float:
    """Lower bound in ms on a step whose micro-batches run in segments or in one piece.

    Where ranks may share micro-batches, each of them does at least the least share of the work that
    a cp_size leaves, of a segment's least tokens, too; all together do no less than the work.

    The first operation of stage p that holds any of the samples A has passed the stages before it,
    and after the last one, a backward, they still run theirs. Both belong to a segment, or to a
    whole micro-batch, and so hold no fewer tokens than a segment must, or than the shortest of A
    has: that is the way to the stage and back. Between them the stage does all work of A on its
    rank, which cutting makes no less.

    *Long samples.* A are the longest ones, as many as make the bound largest. Of the ranks that
    hold them, the slowest does at least the mean of their work.

    Where ranks run in lockstep, a segment takes its group at least what the longest member has, and
    the group divides its experts: the work of a sample by itself counts a share of them. The mean
    work of the ranks of a group counts all.

    *Sample.* A is one sample. Or A are all: the rank of a sample does its work and, since no
    micro-batch is empty, that of at least M - 1 others.
    """
    costs, job = problem.costs, problem.job
    longest_S = np.argsort(-costs.lengths_tokens_S, kind="stable")
    work_SP = costs.sample_ms(problem.budgets.allowed.floor_LS)[:, longest_S].sum(axis=0)
    constant_P = costs.constant_2C.sum(axis=0)
    # The least of a token in any sample.
    dense_SP = dense_layers(costs.dense_LS, costs.chunk_of_layer_L, costs.chunks)
    sparse_P, denser_P = (x[..., TOKENS].sum(axis=0) for x in (costs.sparse_2CF, costs.denser_2CF))
    token_P = sparse_P + (dense_SP * denser_P).min(axis=0)
    share = costs.share_W[1 : max_cp_size + 1].min()
    alone_SP = work_SP * share
    if costs.layers is not None:
        divided = 1.0 - 1.0 / job.lockstep_ranks
        together_SP = costs.layers.together_2SC[:, longest_S].sum(axis=0)
        alone_SP = (work_SP - divided * together_SP) * share
        tokens_S1 = costs.lengths_tokens_S[longest_S][:, None]
        # Where experts cost something whatever the tokens, this takes away too much: still a bound.
        token_P = np.maximum(token_P - divided * (together_SP / tokens_S1).max(axis=0), 0.0)
    tokens_S = np.minimum(costs.lengths_tokens_S[longest_S], problem.plan_settings.segment_tokens)
    tokens_S = tokens_S * share
    passing_SP = tokens_S[:, None] * token_P + constant_P
    way_SP = np.cumsum(passing_SP, axis=1) - passing_SP
    long_SP = np.cumsum(work_SP, axis=0) / job.data_parallel_size + way_SP
    least_SP = np.sort(alone_SP, axis=0)[: job.micro_batches]
    others_SP = least_SP.sum(axis=0) - np.minimum(alone_SP, least_SP[-1])
    all_SP = np.maximum(long_SP[-1], alone_SP + others_SP + way_SP[-1])
    bound_SP = np.maximum(
        np.maximum(long_SP, alone_SP + way_SP) + constant_P, all_SP + job.micro_batches * constant_P
    )
    return float(bound_SP.max() * costs.slowness_RP.min())
