# SPDX-License-Identifier: Apache-2.0
"""A mixture of a pipeline's chains that is long for every way to split work over micro-batches.

Shape legend: P pipeline stages, V virtual stages (chunks per stage), M micro-batches,
O operations; a leading 2: forward and backward.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.pipeline.graph import graph_of
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import Schedule
from sparsebalance_megatron.plan.pipeline.simulator import longest_chain

_ROUNDS = (60, 300)
"""Least and most rounds of the game: 300 come within 2 % of its value."""
_OPERATIONS = 40_000
"""Operations simulated in all rounds together, between those limits."""
_LEARNING_RATE = 3.0
_PROFILE_STEP = 0.05
"""Rounding of a chunk's work over the mean chunk's: one mixture serves all steps of a run."""


def chain_mixture(work_2PV: np.ndarray, micro_batches: int, schedule: Schedule) -> np.ndarray:
    """[2, P, V, M]: in which share of the mixed chains each operation is.

    A pipeline takes at least as long as any chain of operations that wait for one another, and so
    at least as long as any weighted mean of chains. The weights come from a zero-sum game: the
    scheduler splits a rank's work over its micro-batches so that the longest chain is short, the
    adversary weights chains so that their mean is long. Its value, by duality of linear programs,
    is the shortest step that any split of the work can give.

    For any times of the operations, the pipeline takes at least the sum of times x shares; for work
    with this profile that is close to the best bound of its kind.

    Args:
        work_2PV: of all micro-batches together, to any scale.

    Raises:
        PlanError: the schedule does not exist for these numbers.
    """
    profile_2PV = work_2PV / work_2PV.mean() if work_2PV.any() else np.ones_like(work_2PV)
    steps = np.rint(profile_2PV / _PROFILE_STEP).astype(int)
    return _mixture(tuple(steps.ravel().tolist()), work_2PV.shape, micro_batches, schedule)


@lru_cache(maxsize=32)
def _mixture(
    profile: tuple[int, ...], shape: tuple[int, ...], micro_batches: int, schedule: Schedule
) -> np.ndarray:
    """Play the game in rounds: find the longest chain, then move work away from it.

    Work moves by multiplicative weights; later rounds weigh more in the mixture.
    """
    work_2PV1 = np.array(profile, dtype=np.float64).reshape(*shape, 1)
    work_2PV1 /= max(work_2PV1.sum(), 1.0)
    least, most = _ROUNDS
    rounds = min(max(_OPERATIONS // (work_2PV1.size * micro_batches), least), most)
    _, stages, chunks = shape
    graph = graph_of(schedule, stages, chunks, micro_batches)
    alone_RM = unshared(1, micro_batches)
    mixture_2PVM = np.zeros((*shape, micro_batches))
    losses_M = np.zeros(micro_batches)
    for number in range(1, rounds + 1):
        share_M = np.exp(losses_M.min() - losses_M)
        share_M /= share_M.sum()
        ms_OR = (work_2PV1 * share_M).reshape(-1, 1)
        times = OperationTimes(graph=graph, ms_OR=ms_OR, cp_sizes_RM=alone_RM)
        chain_2PVM = longest_chain(times).reshape(mixture_2PVM.shape)
        mixture_2PVM += number * chain_2PVM
        gain_M = (work_2PV1 * chain_2PVM).sum(axis=(0, 1, 2))
        losses_M += _LEARNING_RATE / np.sqrt(number) * gain_M
    mixture_2PVM /= rounds * (rounds + 1) / 2
    mixture_2PVM.flags.writeable = False
    return mixture_2PVM
