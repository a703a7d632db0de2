# SPDX-License-Identifier: Apache-2.0
"""The order of micro-batches where neighbouring ranks begin every layer together (lockstep groups).

A group takes, per operation, the largest time among its ranks, so it is one rank of the pipeline.
Where large micro-batches of one rank meet large ones of the others, the sum of these largest times
is small: without a pipeline, and where backward times rank as forward times do, no order is shorter
than the one in which all times fall.

Shape legend: O operations, W ranks that are ordered together, I their positions.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.step_costs import StepCosts


def in_lockstep_order(
    arrangement: Arrangement, costs: StepCosts, sample_2SC: np.ndarray
) -> Arrangement:
    """The arrangement with every rank's micro-batches in falling order of their time, or itself
    where its lockstep groups are done sooner.

    Args:
        sample_2SC: ms of every sample on a rank by itself.
    """
    times = costs.micro_batch_ms(sample_2SC, arrangement)
    ms_RM = times.by_micro_batch_2RPVM.sum(axis=(0, 2, 3))
    order_RM = falling_order_RM(ms_RM, arrangement.cp_sizes_RM)
    if (order_RM == np.arange(order_RM.shape[1])).all():
        return arrangement
    falling = replace(
        arrangement,
        samples=tuple(
            tuple(of_rank[position] for position in order_M)
            for of_rank, order_M in zip(arrangement.samples, order_RM.tolist(), strict=True)
        ),
        cp_sizes_RM=np.take_along_axis(arrangement.cp_sizes_RM, order_RM, axis=1),
    )
    before_ms, falling_ms = (
        rounded_ms(makespans_ms(replace(each, lockstep_ranks=costs.job.lockstep_ranks)).max())
        for each in (times, costs.micro_batch_ms(sample_2SC, falling))
    )
    return falling if falling_ms <= before_ms else arrangement


def falling_order_RM(ms_RM: np.ndarray, cp_sizes_RM: np.ndarray) -> np.ndarray:
    """Positions of every rank in the order in which their times fall.

    A micro-batch that ranks share keeps one position on all of them. So ranks that share any are
    ordered together, from single ranks to the largest that share:

    1. Both halves of such ranks are ordered by themselves, less what all of them share.
    2. What now stands at the same place in both halves stays together, and counts as the largest
       time in it.
    3. That and what all of them share is sorted by time; equals keep their order.
    """
    ranks = int(cp_sizes_RM.max())
    blocks = zip(_split(ms_RM, ranks), _split(cp_sizes_RM, ranks), strict=True)
    return np.concatenate([_falling_WI(*block) for block in blocks])


def _falling_WI(ms_WM: np.ndarray, cp_sizes_WM: np.ndarray) -> np.ndarray:
    ranks = len(ms_WM)
    shared_I = np.flatnonzero(cp_sizes_WM[0] == ranks)
    order_WI = np.tile(shared_I, (ranks, 1))
    if ranks > 1:
        halves = zip(_split(ms_WM, ranks // 2), _split(cp_sizes_WM, ranks // 2), strict=True)
        order_WI = np.hstack([order_WI, np.concatenate([_falling_WI(*half) for half in halves])])
    largest_I = np.take_along_axis(ms_WM, order_WI, axis=1).max(axis=0)
    return order_WI[:, np.argsort(-largest_I, kind="stable")]


def _split(values_RM: np.ndarray, ranks: int) -> list[np.ndarray]:
    """Rows of so many neighbouring ranks at a time."""
    return np.split(values_RM, len(values_RM) // ranks)
