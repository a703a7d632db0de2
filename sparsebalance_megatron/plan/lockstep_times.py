# SPDX-License-Identifier: Apache-2.0
"""Times of operations where neighbouring ranks wait for one another in every layer.

A lockstep group begins every layer together. So an operation takes the sum over its layers of the
slowest member's own time, and besides what the group does together: its experts, by its tokens.
Every member takes that long, and the group is one rank of the pipeline.

Shape legend: E groups, W ranks of a group, X columns.
"""

from dataclasses import replace

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.step_costs import StepCosts, of_lockstep_groups


def group_times(costs: StepCosts, budgets_LS: np.ndarray, where: Arrangement) -> OperationTimes:
    """Times of placed samples: on every rank those of its lockstep group. What a micro-batch takes
    whatever it holds is that of the slowest device."""
    members_2EWMX = _by_member_2EWMX(costs, layer_ms_2SX(costs, budgets_LS, where), where)
    slowness_EWX = slowness_of_members_EWX(costs)
    ms_2EMC = of_lockstep_groups(members_2EWMX, slowness_EWX, costs.by_layer.chunk_of_X)
    slowest_EC = slowness_EWX[..., costs.by_layer.own :].max(axis=1)
    ms_2EMC += costs.constant_2C[:, None, None] * slowest_EC[:, None]
    ms_2RMC = np.repeat(ms_2EMC, costs.job.lockstep_ranks, axis=1)
    times = costs.flat(ms_2RMC, where.cp_sizes_RM)
    return replace(times, lockstep_ranks=costs.job.lockstep_ranks)


def own_times(costs: StepCosts, times_2RPVM: np.ndarray, where: Arrangement) -> np.ndarray:
    """Own times of micro-batches, from times at which each rank passes its own samples through
    experts: a rank's experts compute an equal share of its group's samples instead."""
    cp_size_S = where.cp_sizes_RM.reshape(-1)[where.micro_batch_of_S]
    together_2SC = costs.together_2SC * costs.share_W[cp_size_S][:, None]
    own_2EWMC = _by_member_2EWMX(costs, together_2SC, where)
    more_2EWMC = own_2EWMC.mean(axis=2, keepdims=True) - own_2EWMC
    two, ranks, *chunks, positions = times_2RPVM.shape
    more_2RPVM = np.moveaxis(more_2EWMC.reshape(two, ranks, positions, *chunks), 2, -1)
    return times_2RPVM + costs.slowness_RP[..., None, None] * more_2RPVM


def layer_ms_2SX(costs: StepCosts, budgets_LS: np.ndarray, where: Arrangement) -> np.ndarray:
    """Ms of placed samples in the columns of layers, on each of the ranks that share them."""
    cp_size_S = where.cp_sizes_RM.reshape(-1)[where.micro_batch_of_S]
    return costs.by_layer.at_cp_size(costs.by_layer.ms_2SX(budgets_LS), cp_size_S)


def slowness_of_members_EWX(costs: StepCosts) -> np.ndarray:
    """Factors on the times of every member of a group in the columns of layers."""
    slowness_RX = costs.slowness_RP[:, costs.by_layer.chunk_of_X // costs.job.virtual_stages]
    return slowness_RX.reshape(-1, costs.job.lockstep_ranks, slowness_RX.shape[1])


def _by_member_2EWMX(costs: StepCosts, ms_2SX: np.ndarray, where: Arrangement) -> np.ndarray:
    """Sums over the samples of every micro-batch, on each of its ranks."""
    job = costs.job
    sums_2JX = np.zeros((2, job.places, ms_2SX.shape[2]))
    for sums_JX, ms_SX in zip(sums_2JX, ms_2SX, strict=True):
        np.add.at(sums_JX, where.micro_batch_of_S, ms_SX)
    if where.cp_sizes_RM.max() > 1:
        sums_2JX = sums_2JX[:, first_places(where.cp_sizes_RM)]
    return sums_2JX.reshape(2, -1, job.lockstep_ranks, job.micro_batches, ms_2SX.shape[2])
