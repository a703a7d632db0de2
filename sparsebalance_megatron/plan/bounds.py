# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of step times over all placements of a step's samples, with micro-batches of one
rank or of several, in one piece or in segments.

Shape legend: M micro-batches (positions of a rank), W cp_sizes.
"""

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.step_costs import TOKENS, StepCosts
from sparsebalance_megatron.plan.step_problem import StepProblem


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds in ms on the time of a step; the largest one counts.

    ``long_ms`` follows from the longer samples, or from all, ``chain_ms_S`` from single samples.
    """

    long_ms: float
    chain_ms_S: np.ndarray

    @property
    def bound_ms(self) -> float:
        return max(self.long_ms, float(self.chain_ms_S.max()))

    @property
    def unhideable_S(self) -> np.ndarray:
        """Samples that alone keep the step longer than all work together has to.

        No placement hides such a sample; a smaller budget, a shorter sample or context parallelism
        does. With P equal stages and M micro-batches of mean time mu all work together takes
        (M + P - 1) mu, and the chain of a micro-batch of time X mu is at least P X mu: beyond
        X = (M + P - 1) / P no order and no rank hides it.
        """
        return self.chain_ms_S > self.long_ms


def step_bounds(sample_2SX: np.ndarray, costs: StepCosts, max_cp_size: int = 1) -> Bounds:
    """No placement of these samples into micro-batches of 1, 2, 4, ... ranks finishes a step
    sooner.

    Holds for every schedule of :mod:`.orders`, whatever shares a micro-batch. A micro-batch of
    cp_size w takes its share of each sample's work on all w ranks, (1 + loss) / w of it and so at
    least 1 / w, beside the constant of a micro-batch and what is exchanged. Summed over its ranks
    that is at least the samples' work on one rank and w constants. Every place (rank, position)
    belongs to one micro-batch, and no micro-batch is empty.

    *Long samples.* Of the micro-batches that hold any of the samples A, stage p does the work of A,
    with a constant at least, after the shortest way of a sample of A to it, through the first
    chunks of stages 0..p-1, and before the shortest way back, at the best of all cp_sizes. The mean
    over the ranks that have such micro-batches of the work of A is least if they are all ranks. A
    are the samples whose ways are longest, as many as make the bound largest: short samples fill a
    pipeline quickly, but then the first long one is still on its way. All samples lie in all
    positions, with a constant each.

    *Chain.* Micro-batch i runs forward and backward through all chunks one after the other. On
    stage 0 the first chunk runs forward for every earlier micro-batch before that chain starts and
    backward for every later one after it ends; each of the M - 1 others is earlier or later. So
    T >= chain(i) + the sum of the M - 1 least min(forward, backward) of the others. The micro-batch
    of a sample takes at least as long as the sample alone, at the best of all cp_sizes.

    *Lockstep groups.* The ranks of a group divide their experts' work, which changes no sum over
    ranks. But of a sample's experts, its own micro-batch takes only as many parts of its group's as
    ranks share the sample.

    Args:
        sample_2SX: ms of every sample on a rank by itself.
        max_cp_size: of a micro-batch.
    """
    job, constant_2C = costs.job, costs.constant_2C
    stages, samples = job.pipeline_stages, sample_2SX.shape[1]
    constant_P = constant_2C.reshape(2, stages, -1).sum(axis=(0, 2))
    chain_S, beside_S = np.full((2, samples), np.inf)
    work_SP, way_2SP = np.full((samples, stages), np.inf), np.full((2, samples, stages), np.inf)
    for cp_size in (1 << power for power in range(max_cp_size.bit_length())):
        on_each_2SX = costs.at_cp_size(sample_2SX, np.full(samples, cp_size))
        on_each_2SC = costs.by_chunk(on_each_2SX)
        # Other ranks of the lockstep group compute a part of the sample's experts.
        divided = max(0.0, 1.0 - cp_size / job.lockstep_ranks) * on_each_2SX[..., costs.own :]
        work_2SPV = cp_size * on_each_2SC.reshape(2, samples, stages, -1)
        work_SP = np.minimum(work_SP, work_2SPV.sum(axis=(0, 3)))
        alone_2SC = on_each_2SC + constant_2C[:, None] - divided
        chain_S = np.minimum(chain_S, alone_2SC.sum(axis=(0, 2)))
        beside_S = np.minimum(beside_S, alone_2SC[:, :, 0].min(axis=0))
        first_2SP = alone_2SC.reshape(2, samples, stages, -1)[..., 0]
        way_2SP = np.minimum(way_2SP, np.cumsum(first_2SP, axis=-1) - first_2SP)
    least = np.sort(beside_S)[: job.micro_batches]
    order_S = np.argsort(-way_2SP[..., -1].sum(axis=0), kind="stable")
    least_2SP = np.minimum.accumulate(way_2SP[:, order_S], axis=1)
    long_SP = np.cumsum(work_SP[order_S], axis=0) / job.data_parallel_size + least_2SP.sum(axis=0)
    # All samples together lie in all micro-batches.
    constants_SP = np.broadcast_to(constant_P, long_SP.shape).copy()
    constants_SP[-1] *= job.micro_batches
    return Bounds(
        long_ms=float((long_SP + constants_SP).max()),
        chain_ms_S=chain_S + least.sum() - np.minimum(beside_S, least[-1]),
    )


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
    work_SX = costs.sample_ms(problem.allowed.floor_LS)[:, longest_S].sum(axis=0)
    work_SP, together_SP = costs.by_chunk(work_SX), work_SX[:, costs.own :]
    constant_P = costs.constant_2C.sum(axis=0)
    # The least of a token in any sample.
    sparse_X, denser_X = (
        each_2XF[..., TOKENS].sum(axis=0) for each_2XF in (costs.sparse_2XF, costs.denser_2XF)
    )
    token_P = costs.by_chunk(sparse_X + costs.dense_SX * denser_X).min(axis=0)
    share = costs.share_W[1 : max_cp_size + 1].min()
    divided_SP = (1.0 - 1.0 / job.lockstep_ranks) * together_SP
    alone_SP = (work_SP - divided_SP) * share
    tokens_S1 = costs.lengths_tokens_S[longest_S][:, None]
    # Where experts cost something whatever the tokens, this takes away too much: still a bound.
    token_P = np.maximum(token_P - (divided_SP / tokens_S1).max(axis=0), 0.0)
    tokens_S = np.minimum(
        costs.lengths_tokens_S[longest_S], problem.plan_settings.config.segment_tokens
    )
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
