# SPDX-License-Identifier: Apache-2.0
"""What no plan can beat: lower bounds on a step's time, and samples that no placement can hide.

Shape legend: D ranks, P stages, V chunks per stage, M micro-batches per rank, S samples,
C = P x V chunks (chunk v of stage p is ``p * V + v``), I micro-batches or samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds in ms on the time of a step; the largest one counts.

    ``stage_ms``, ``mean_chain_ms``: of all work together. ``chain_ms_I``: because of one
    micro-batch or sample.
    """

    stage_ms: float
    mean_chain_ms: float
    chain_ms_I: np.ndarray

    @property
    def bound_ms(self) -> float:
        return max(self.stage_ms, self.mean_chain_ms, float(self.chain_ms_I.max()))

    @property
    def unhideable_I(self) -> np.ndarray:
        """Which ones alone keep the step longer than all work together has to.

        No placement hides such a sample; a smaller budget, a shorter sample or context parallelism
        does. With P equal stages and M micro-batches of mean time mu, the stage bound is
        (M + P - 1) mu and the chain of a micro-batch of time X mu is at least P X mu: it is
        certainly unhideable beyond :func:`unhideable_limit`.
        """
        return self.chain_ms_I > max(self.stage_ms, self.mean_chain_ms)


def unhideable_limit(stages: int, micro_batches: int) -> float:
    """X* = (M + P - 1) / P: largest over mean micro-batch above which balance cannot be reached.

    *Proof sketch.* All P stages of micro-batch i run one after the other, forward then backward,
    so T >= P X mu. Perfect balance takes (M + P - 1) mu: stage 0 works M mu, and the first forward
    to reach the last stage and the last backward to return from it add P - 1 more. P X > M + P - 1
    contradicts T = (M + P - 1) mu. The proof uses neither order nor rank, hence no placement helps.
    """
    return (micro_batches + stages - 1) / stages


def micro_batch_bounds(
    forward_DPVM: np.ndarray, backward_DPVM: np.ndarray, *, p2p_ms: float = 0.0
) -> Bounds:
    """No arrangement of these micro-batches over ranks and positions finishes a step sooner.

    Holds for every schedule of :mod:`.pipeline` and unequal stages. Three bounds:

    *Stage.* The first operation of stage p is a forward of its first chunk, which some micro-batch
    reaches through the first chunks of stages 0..p-1; the last is a backward of the first chunk,
    after which stages p-1..0 still run theirs. In between stage p of a rank does all its work. The
    slowest rank takes at least the mean over ranks, and the D ranks start with D micro-batches. So
    T >= mean work + mean of the D least heads + mean of the D least tails.

    *Chain.* Micro-batch i runs forward and backward through all chunks one after the other. On
    stage 0 the first chunk runs forward for every earlier micro-batch before that chain starts and
    backward for every later one after it ends; each of the M - 1 others is earlier or later. So
    T >= chain(i) + the sum of the M - 1 least min(forward, backward) of the others.

    *Mean chain.* The mean of the chain bound over the D x M micro-batches, with what really is in
    each rank: T >= (all chains + (M - 1) x all min(forward, backward)) / (D M).
    """
    data_parallel, _, _, micro_batches = forward_DPVM.shape
    work_P = (forward_DPVM + backward_DPVM).sum(axis=(0, 2, 3)) / data_parallel
    beside = np.minimum(forward_DPVM[:, 0, 0], backward_DPVM[:, 0, 0]).sum()
    forward_IPV, backward_IPV = (
        times.transpose(0, 3, 1, 2).reshape(-1, *times.shape[1:3])
        for times in (forward_DPVM, backward_DPVM)
    )
    return _bounds(
        work_P, beside, forward_IPV, backward_IPV, (data_parallel, micro_batches), p2p_ms
    )


def sample_bounds(
    sample_forward_SC: np.ndarray,
    sample_backward_SC: np.ndarray,
    constant_forward_C: np.ndarray,
    constant_backward_C: np.ndarray,
    *,
    data_parallel_size: int,
    micro_batches: int,
    virtual_stages: int,
) -> Bounds:
    """No placement of these samples into slots, whatever shares a slot, finishes a step sooner.

    The bounds of :func:`micro_batch_bounds`, with what holds for every placement in the place of
    the micro-batches: the work is that of all samples and D x M constants; a slot is never empty,
    so each costs at least what its cheapest sample alone would; and the slot of sample i takes at
    least as long as sample i alone.
    """
    samples, chunks = sample_forward_SC.shape
    shape = (samples, chunks // virtual_stages, virtual_stages)
    alone_forward = (sample_forward_SC + constant_forward_C).reshape(shape)
    alone_backward = (sample_backward_SC + constant_backward_C).reshape(shape)
    constant_P = (constant_forward_C + constant_backward_C).reshape(shape[1:]).sum(axis=1)
    sample_P = (sample_forward_SC + sample_backward_SC).reshape(shape).sum(axis=(0, 2))
    work_P = sample_P / data_parallel_size + micro_batches * constant_P
    slots = data_parallel_size * micro_batches
    beside = np.minimum(sample_forward_SC[:, 0], sample_backward_SC[:, 0]).sum()
    beside += slots * min(constant_forward_C[0], constant_backward_C[0])
    return _bounds(
        work_P,
        float(beside),
        alone_forward,
        alone_backward,
        (data_parallel_size, micro_batches),
        0.0,
    )


def _bounds(
    work_P: np.ndarray,
    beside_ms: float,
    forward_IPV: np.ndarray,
    backward_IPV: np.ndarray,
    ranks_and_micro_batches: tuple[int, int],
    p2p_ms: float,
) -> Bounds:
    """``work_P``: of a stage, per rank. ``beside_ms``: min(forward, backward) of first chunks."""
    ranks, micro_batches = ranks_and_micro_batches
    _, stages, virtual_stages = forward_IPV.shape
    bound_P = work_P + 2 * p2p_ms * np.arange(stages)
    for times_IPV in (forward_IPV, backward_IPV):
        first_IP = times_IPV[:, :, 0]
        until_IP = np.sort(np.cumsum(first_IP, axis=1) - first_IP, axis=0)
        bound_P = bound_P + until_IP[:ranks].mean(axis=0)
    crossings_ms = 2 * (stages * virtual_stages - 1) * p2p_ms if stages > 1 else 0.0
    chain_I = (forward_IPV + backward_IPV).sum(axis=(1, 2)) + crossings_ms
    beside_I = np.minimum(forward_IPV[:, 0, 0], backward_IPV[:, 0, 0])
    least = np.sort(beside_I)[:micro_batches]
    others_I = least.sum() - np.minimum(beside_I, least[-1])
    mean_chain = work_P.sum() / micro_batches + crossings_ms
    mean_chain += (micro_batches - 1) * beside_ms / (ranks * micro_batches)
    return Bounds(
        stage_ms=float(bound_P.max()),
        mean_chain_ms=float(mean_chain),
        chain_ms_I=chain_I + others_I,
    )
