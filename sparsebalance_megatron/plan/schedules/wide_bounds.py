# SPDX-License-Identifier: Apache-2.0
"""What no plan can beat whose slots may be several ranks wide.

Shape legend: P pipeline stages, V virtual stages, S samples of a global batch, C = P x V chunks,
R data-parallel ranks, M micro-batches (positions of a rank), W widths; a leading 2: forward and
backward.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.schedules.bounds import Bounds
from sparsebalance_megatron.plan.schedules.chain_mixture import chain_mixture
from sparsebalance_megatron.plan.schedules.orders import schedule_of
from sparsebalance_megatron.plan.step_costs import StepCosts

_HALVINGS = 12


def wide_bounds(sample_2SC: np.ndarray, costs: StepCosts, max_width: int) -> Bounds:
    """No placement of these samples into slots of 1, 2, 4, ... ranks finishes a step sooner.

    A slot of width w takes its share of each sample's work on all w ranks, (1 + loss) / w of it and
    so at least 1 / w, beside the constant of a micro-batch and what is exchanged. Summed over its
    ranks that is at least the samples' work on one rank and w constants. Every place (rank,
    position) belongs to one slot. The bounds are those of :func:`.sample_bounds`, for whose proofs
    only these sums and the least times of a slot count:

    *Stage.* The mean over ranks of what stage p does in between is at least all samples' work and
    R x M constants over R. Before it begins, the slot at a rank's first position passes stages
    0..p-1. The first positions of the R ranks hold at least R / W slots, W the widest, and these
    different samples; summed over ranks they take at least R constants and the work of the R / W
    samples with the least of it. The same holds for the last positions and the backwards.

    *Chain.* A sample's slot takes, over all chunks, at least as long as the sample alone at the
    best of all widths; the other M - 1 slots of a rank hold other samples, of which the same holds.

    *Mean chain.* Averaged over places, chains and the lesser of forward and backward are sums over
    slots of w times what one of its ranks takes: at least those of the samples on one rank.

    *Mixed chains.* A rank takes at least as long as any mixture of its chains, and the slowest at
    least the mean over ranks. There each sample counts, at some position and some width, w times
    what one of its ranks takes, times the shares that the mixture has of that position's
    operations; and every place its constants. The least over positions and widths of each sample,
    and the constants, bound the step (:mod:`.chain_mixture` finds shares that make this large: it
    sees what filling and emptying a pipeline costs, however small the slots at both ends).
    Moreover, if a step ends by X, no slot has a width at which its chain takes longer. With only
    the widths that X leaves, let the bound be F(X). A step that ends at T has T >= F(T), and F
    falls; so T > X wherever F(X) > X.

    Args:
        sample_2SC: ms of every sample on every chunk, on a rank by itself.
        max_width: of a slot.
    """
    job, constant_2C = costs.job, costs.constant_2C
    ranks, positions = job.data_parallel_size, job.micro_batches
    shape = (-1, job.pipeline_stages, job.virtual_stages)
    constant_2PV = constant_2C.reshape(2, *shape[1:])
    sample_2SPV = sample_2SC.reshape(2, *shape)
    constant_P = constant_2PV.sum(axis=(0, 2))
    work_P = sample_2SPV.sum(axis=(0, 1, 3)) / ranks + positions * constant_P

    stage_P = work_P
    for sample_SPV, constant_PV in zip(sample_2SPV, constant_2PV, strict=True):
        first_SP, first_P = sample_SPV[:, :, 0], constant_PV[:, 0]
        until_SP = np.sort(np.cumsum(first_SP, axis=1) - first_SP, axis=0)
        least_P = until_SP[: ranks // max_width].sum(axis=0) / ranks
        stage_P = stage_P + least_P + np.cumsum(first_P) - first_P

    mixture_2CM = chain_mixture(
        sample_2SPV.sum(axis=1) + ranks * positions * constant_2PV, positions, schedule_of(job)
    ).reshape(*constant_2C.shape, -1)
    widths = [1 << power for power in range(max_width.bit_length())]
    chain_WS, mixed_WS = np.empty((2, len(widths), sample_2SC.shape[1]))
    beside_S = np.full(sample_2SC.shape[1], np.inf)
    for place, width in enumerate(widths):
        alone_2SC = costs.wide_ms(sample_2SC, np.full(sample_2SC.shape[1], width))
        mixed_WS[place] = width * _least_mixed_ms(alone_2SC, mixture_2CM)
        alone_2SC = alone_2SC + constant_2C[:, None]
        chain_WS[place] = alone_2SC.sum(axis=(0, 2))
        beside_S = np.minimum(beside_S, alone_2SC[:, :, 0].min(axis=0))
    least = np.sort(beside_S)[:positions]
    chain_WS += least.sum() - np.minimum(beside_S, least[-1])
    constant_ms = float((mixture_2CM * constant_2C[..., None]).sum())

    beside_ms = sample_2SC[:, :, 0].min(axis=0).sum() + job.slots * constant_2C[:, 0].min()
    mean_chain_ms = work_P.sum() / positions + (positions - 1) * beside_ms / job.slots
    chain_ms_S = chain_WS.min(axis=0)
    known_ms = max(float(stage_P.max()), float(chain_ms_S.max()))
    mixed_ms = _largest_contradicted_ms(known_ms, mixed_WS / ranks, chain_WS, constant_ms)
    return Bounds(
        stage_ms=max(float(stage_P.max()), mixed_ms),
        mean_chain_ms=float(mean_chain_ms),
        chain_ms_S=chain_ms_S,
    )


def _least_mixed_ms(sample_2SC: np.ndarray, mixture_2CM: np.ndarray) -> np.ndarray:
    """[S] of each sample at the position where it adds least to the mixture."""
    least_S = np.full(sample_2SC.shape[1], np.inf)
    for position in range(mixture_2CM.shape[2]):
        shares_21C = mixture_2CM[:, None, :, position]
        np.minimum(least_S, (sample_2SC * shares_21C).sum(axis=(0, 2)), out=least_S)
    return least_S


def _largest_contradicted_ms(
    known_ms: float, mixed_WS: np.ndarray, chain_WS: np.ndarray, constant_ms: float
) -> float:
    """The largest X found with F(X) > X, or F of any width where that is less than what is known.

    Args:
        known_ms: a bound of the step.
        mixed_WS: what samples add to the mixed chains at each width.
        chain_WS: what a step takes at least that has them at that width.
    """

    def bound_ms(end_ms: float) -> float:
        least_S = np.where(chain_WS <= end_ms, mixed_WS, np.inf).min(axis=0)
        return float(least_S.sum()) + constant_ms

    low_ms = max(known_ms, bound_ms(np.inf))
    high_ms = min(bound_ms(low_ms), 2.0 * low_ms)
    for _ in range(_HALVINGS if high_ms > low_ms else 0):
        middle_ms = (low_ms + high_ms) / 2
        if bound_ms(middle_ms) > middle_ms:
            low_ms = middle_ms
        else:
            high_ms = middle_ms
    return low_ms
