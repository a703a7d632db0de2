# SPDX-License-Identifier: Apache-2.0
"""What no plan can beat whose slots may be several ranks wide.

Shape legend: P pipeline stages, V virtual stages, S samples of a global batch, C = P x V chunks,
R data-parallel ranks, M micro-batches (positions of a rank); a leading 2: forward and backward.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.schedules.bounds import Bounds
from sparsebalance_megatron.plan.step_costs import StepCosts


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

    chain_S, beside_S = (np.full(sample_2SC.shape[1], np.inf) for _ in range(2))
    width = 1
    while width <= max_width:
        alone_2SC = costs.wide_ms(sample_2SC, np.full(sample_2SC.shape[1], width))
        alone_2SC = alone_2SC + constant_2C[:, None]
        chain_S = np.minimum(chain_S, alone_2SC.sum(axis=(0, 2)))
        beside_S = np.minimum(beside_S, alone_2SC[:, :, 0].min(axis=0))
        width *= 2
    least = np.sort(beside_S)[:positions]
    others_S = least.sum() - np.minimum(beside_S, least[-1])

    beside_ms = sample_2SC[:, :, 0].min(axis=0).sum() + job.slots * constant_2C[:, 0].min()
    mean_chain_ms = work_P.sum() / positions + (positions - 1) * beside_ms / job.slots
    return Bounds(
        stage_ms=float(stage_P.max()),
        mean_chain_ms=float(mean_chain_ms),
        chain_ms_S=chain_S + others_S,
    )
