# SPDX-License-Identifier: Apache-2.0
"""What no plan can beat: lower bounds on a step's time, and samples that no placement can hide.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), S samples of a global batch,
C = P x V chunks (chunk v of stage p is ``p * V + v``); a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.step_plan import JobShape


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds in ms on the time of a step; the largest one counts.

    ``stage_ms``, ``mean_chain_ms``: of all work together. ``chain_ms_S``: because of one sample.
    """

    stage_ms: float
    mean_chain_ms: float
    chain_ms_S: np.ndarray

    @property
    def bound_ms(self) -> float:
        return max(self.stage_ms, self.mean_chain_ms, float(self.chain_ms_S.max()))

    @property
    def unhideable_S(self) -> np.ndarray:
        """Which ones alone keep the step longer than all work together has to.

        No placement hides such a sample; a smaller budget, a shorter sample or context parallelism
        does. With P equal stages and M micro-batches of mean time mu, the stage bound is
        (M + P - 1) mu and the chain of a micro-batch of time X mu is at least P X mu: it is
        certainly unhideable beyond X = (M + P - 1) / P, whatever the order and the rank.
        """
        return self.chain_ms_S > max(self.stage_ms, self.mean_chain_ms)


def unhideable_limit(stages: int, micro_batches: int) -> float:
    """X* = (M + P - 1) / P: largest over mean micro-batch above which balance cannot be reached.

    *Proof sketch.* All P stages of micro-batch i run one after the other, forward then backward,
    so T >= P X mu. Perfect balance takes (M + P - 1) mu: stage 0 works M mu, and the first forward
    to reach the last stage and the last backward to return from it add P - 1 more. P X > M + P - 1
    contradicts T = (M + P - 1) mu. The proof uses neither order nor rank, hence no placement helps.
    """
    return (micro_batches + stages - 1) / stages


def sample_bounds(sample_2SC: np.ndarray, constant_2C: np.ndarray, job: JobShape) -> Bounds:
    """No placement of these samples into slots, whatever shares a slot, finishes a step sooner.

    Holds for every schedule of :mod:`.orders` and unequal stages. With the R ranks and M
    micro-batches per rank of the job, three bounds of fixed micro-batches:

    *Stage.* The first operation of stage p is a forward of its first chunk, which some micro-batch
    reaches through the first chunks of stages 0..p-1; the last is a backward of the first chunk,
    after which stages p-1..0 still run theirs. In between stage p of a rank does all its work. The
    slowest rank takes at least the mean over ranks, and the R ranks start with R micro-batches. So
    T >= mean work + mean of the R least heads + mean of the R least tails.

    *Chain.* Micro-batch i runs forward and backward through all chunks one after the other. On
    stage 0 the first chunk runs forward for every earlier micro-batch before that chain starts and
    backward for every later one after it ends; each of the M - 1 others is earlier or later. So
    T >= chain(i) + the sum of the M - 1 least min(forward, backward) of the others.

    *Mean chain.* The mean of the chain bound over the R x M micro-batches, with what really is in
    each rank: T >= (all chains + (M - 1) x all min(forward, backward)) / (R M).

    Of samples holds what holds of the micro-batches of every placement: the work is that of all
    samples and R x M constants; a slot is never empty, so each costs at least what its cheapest
    sample alone would; and the slot of sample i takes at least as long as sample i alone.

    Args:
        sample_2SC: ms of every sample on every chunk.
        constant_2C: ms of a micro-batch on every chunk, whatever it holds.
    """
    ranks, micro_batches = job.data_parallel_size, job.micro_batches
    shape = (-1, job.pipeline_stages, job.virtual_stages)
    alone_2SPV = (sample_2SC + constant_2C[:, None]).reshape(2, *shape)
    constant_P = (constant_2C[0] + constant_2C[1]).reshape(shape[1:]).sum(axis=1)
    sample_SPV = (sample_2SC[0] + sample_2SC[1]).reshape(shape)
    work_P = sample_SPV.sum(axis=(0, 2)) / ranks + micro_batches * constant_P

    bound_P = work_P
    for alone_SPV in alone_2SPV:
        first_SP = alone_SPV[:, :, 0]
        until_SP = np.sort(np.cumsum(first_SP, axis=1) - first_SP, axis=0)
        bound_P = bound_P + until_SP[:ranks].mean(axis=0)

    chain_S = (alone_2SPV[0] + alone_2SPV[1]).sum(axis=(1, 2))
    beside_S = alone_2SPV[:, :, 0, 0].min(axis=0)
    least = np.sort(beside_S)[:micro_batches]
    others_S = least.sum() - np.minimum(beside_S, least[-1])

    beside_ms = sample_2SC[:, :, 0].min(axis=0).sum() + job.slots * constant_2C[:, 0].min()
    mean_chain_ms = work_P.sum() / micro_batches + (micro_batches - 1) * beside_ms / job.slots
    return Bounds(
        stage_ms=float(bound_P.max()),
        mean_chain_ms=float(mean_chain_ms),
        chain_ms_S=chain_S + others_S,
    )
