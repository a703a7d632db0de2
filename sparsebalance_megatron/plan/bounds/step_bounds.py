# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of step times over all placements of a step's samples, with micro-batches of one
rank or of several.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), S samples of a global batch,
C = P x V chunks (chunk v of stage p is ``p * V + v``), R data-parallel ranks, M micro-batches
(positions of a rank), W cp_sizes; a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.bounds.chain_mixture import chain_mixture
from sparsebalance_megatron.plan.step_costs import StepCosts

_HALVINGS = 12
"""Bisections in the search for the largest contradicted time."""


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds in ms on the time of a step; the largest one counts.

    ``mixed_ms`` follows from all work together, ``long_ms`` from the longer samples,
    ``chain_ms_S`` from single samples. ``contradicted_ms``: a step that ended
    by then would need cp_sizes at which it could not end by then.
    """

    mixed_ms: float
    long_ms: float
    chain_ms_S: np.ndarray
    contradicted_ms: float

    @property
    def bound_ms(self) -> float:
        alone_ms = float(self.chain_ms_S.max())
        return max(self.mixed_ms, self.long_ms, alone_ms, self.contradicted_ms)

    @property
    def unhideable_S(self) -> np.ndarray:
        """Samples that alone keep the step longer than all work together has to.

        No placement hides such a sample; a smaller budget, a shorter sample or context parallelism
        does. With P equal stages and M micro-batches of mean time mu all work together takes
        (M + P - 1) mu, and the chain of a micro-batch of time X mu is at least P X mu: beyond
        X = (M + P - 1) / P no order and no rank hides it.
        """
        return self.chain_ms_S > self.mixed_ms


def step_bounds(sample_2SC: np.ndarray, costs: StepCosts, max_cp_size: int = 1) -> Bounds:
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
    pipeline quickly, but then the first long one is still on its way.

    *Chain.* Micro-batch i runs forward and backward through all chunks one after the other. On
    stage 0 the first chunk runs forward for every earlier micro-batch before that chain starts and
    backward for every later one after it ends; each of the M - 1 others is earlier or later. So
    T >= chain(i) + the sum of the M - 1 least min(forward, backward) of the others. The micro-batch
    of a sample takes at least as long as the sample alone, at the best of all cp_sizes.

    *Mixed chains.* A rank takes at least as long as any mixture of its chains, and the slowest at
    least the mean over ranks. There each sample counts, at some position and some cp_size, w times
    what one of its ranks takes, times the shares that the mixture has of that position's
    operations; and every place its constants. The least over positions and cp_sizes of each sample,
    and the constants, bound the step (:func:`chain_mixture` finds shares that make this large: it
    sees what filling and emptying a pipeline costs, however small the micro-batches at both ends).

    *Lockstep groups.* The ranks of a group divide their experts' work, which changes no sum over
    ranks. But of a sample's experts, its own micro-batch takes only as many parts of its group's as
    ranks share the sample.

    Moreover, if a step ends by X, no micro-batch has a cp_size at which its chain takes longer.
    With only the cp_sizes that X leaves, let the bounds of long samples and mixed chains be F(X). A
    step that ends at T has T >= F(T), and F falls; so T > X wherever F(X) > X.

    Args:
        sample_2SC: ms of every sample on every chunk, on a rank by itself.
        max_cp_size: of a micro-batch.
    """
    job, constant_2C = costs.job, costs.constant_2C
    ranks, positions = job.data_parallel_size, job.micro_batches
    stages, samples = job.pipeline_stages, sample_2SC.shape[1]
    constant_2PV = constant_2C.reshape(2, stages, -1)
    sample_2SPV = sample_2SC.reshape(2, samples, stages, -1)
    constant_P = constant_2PV.sum(axis=(0, 2))
    work_2PV = sample_2SPV.sum(axis=1) + ranks * positions * constant_2PV
    mixture_2CM = chain_mixture(work_2PV, positions, job.schedule).reshape(*constant_2C.shape, -1)
    cp_sizes = [1 << power for power in range(max_cp_size.bit_length())]
    chain_WS, mixed_WS = np.empty((2, len(cp_sizes), samples))
    work_WSP = np.empty((len(cp_sizes), samples, stages))
    beside_S, way_2SP = np.full(samples, np.inf), np.full((2, samples, stages), np.inf)
    for place, cp_size in enumerate(cp_sizes):
        on_each_2SC = costs.ms_at_cp_size(sample_2SC, np.full(samples, cp_size))
        mixed_WS[place] = cp_size * _least_mixed_ms(on_each_2SC, mixture_2CM)
        work_WSP[place] = cp_size * on_each_2SC.reshape(2, samples, stages, -1).sum(axis=(0, 3))
        alone_2SC = on_each_2SC + constant_2C[:, None] - _divided_2SC(costs, cp_size)
        chain_WS[place] = alone_2SC.sum(axis=(0, 2))
        beside_S = np.minimum(beside_S, alone_2SC[:, :, 0].min(axis=0))
        first_2SP = alone_2SC.reshape(2, samples, stages, -1)[..., 0]
        way_2SP = np.minimum(way_2SP, _ways(first_2SP))
    least = np.sort(beside_S)[:positions]
    chain_WS += least.sum() - np.minimum(beside_S, least[-1])

    placed = _PlacedWork(
        chain_WS=chain_WS,
        mixed_WS=mixed_WS / ranks,
        mixed_constant_ms=float((mixture_2CM * constant_2C[..., None]).sum()),
        work_WSP=work_WSP / ranks,
        work_constant_P=constant_P,
        way_2SP=way_2SP,
    )
    chain_ms_S = chain_WS.min(axis=0)
    return Bounds(
        mixed_ms=placed.mixed_ms(np.inf),
        long_ms=placed.long_ms(np.inf),
        chain_ms_S=chain_ms_S,
        contradicted_ms=placed.largest_contradicted_ms(float(chain_ms_S.max())),
    )


def _divided_2SC(costs: StepCosts, cp_size: int) -> np.ndarray | float:
    """Ms of each sample's experts that other ranks of its lockstep group compute."""
    if costs.layers is None:
        return 0.0
    others = max(0.0, 1.0 - cp_size / costs.job.lockstep_ranks)
    return np.asarray(others * costs.share_W[cp_size] * costs.layers.together_2SC)


def _ways(first_2SP: np.ndarray) -> np.ndarray:
    """What passing the stages before each takes, from the ms of the first chunk of every stage."""
    return np.asarray(np.cumsum(first_2SP, axis=-1) - first_2SP)


def _least_mixed_ms(sample_2SC: np.ndarray, mixture_2CM: np.ndarray) -> np.ndarray:
    """[S] of each sample at the position where it adds least to the mixture."""
    least_S = np.full(sample_2SC.shape[1], np.inf)
    for position in range(mixture_2CM.shape[2]):
        shares_21C = mixture_2CM[:, None, :, position]
        np.minimum(least_S, (sample_2SC * shares_21C).sum(axis=(0, 2)), out=least_S)
    return least_S


@dataclass(frozen=True, kw_only=True)
class _PlacedWork:
    """Bounds that depend on which cp_sizes a step leaves its samples by when it ends.

    Constants count once.

    Attributes:
        chain_WS: ms that a step takes at least with a sample at each cp_size.
        mixed_WS: ms that the sample adds to the mixed chains.
        mixed_constant_ms: constants of all places in the mixed chains.
        work_WSP: ms that the sample adds to the mean work of a rank on each stage.
        work_constant_P: constants of a rank on each stage.
        way_2SP: ms to each stage and back from it, at the best of all cp_sizes.
    """

    chain_WS: np.ndarray
    mixed_WS: np.ndarray
    mixed_constant_ms: float
    work_WSP: np.ndarray
    work_constant_P: np.ndarray
    way_2SP: np.ndarray

    def mixed_ms(self, end_ms: float) -> float:
        """The bound of mixed chains for a step that ends by then."""
        least_S = np.where(self.chain_WS <= end_ms, self.mixed_WS, np.inf).min(axis=0)
        return float(least_S.sum()) + self.mixed_constant_ms

    def long_ms(self, end_ms: float) -> float:
        """The bound of the longer samples for a step that ends by then."""
        order_S = np.argsort(-self.way_2SP[..., -1].sum(axis=0), kind="stable")
        allowed_WS1 = (self.chain_WS <= end_ms)[..., None]
        work_SP = np.where(allowed_WS1, self.work_WSP, np.inf).min(axis=0)
        least_2SP = np.minimum.accumulate(self.way_2SP[:, order_S], axis=1)
        together_SP = np.cumsum(work_SP[order_S], axis=0) + least_2SP.sum(axis=0)
        return float((together_SP + self.work_constant_P).max())

    def largest_contradicted_ms(self, known_ms: float) -> float:
        """The largest X found with F(X) > X, and no less than what is known.

        Args:
            known_ms: a bound of the step.
        """

        def bound_ms(end_ms: float) -> float:
            return max(self.mixed_ms(end_ms), self.long_ms(end_ms))

        low_ms = max(known_ms, bound_ms(np.inf))
        high_ms = min(bound_ms(low_ms), 2.0 * low_ms)
        for _ in range(_HALVINGS if high_ms > low_ms else 0):
            middle_ms = (low_ms + high_ms) / 2
            if bound_ms(middle_ms) > middle_ms:
                low_ms = middle_ms
            else:
                high_ms = middle_ms
        return low_ms
