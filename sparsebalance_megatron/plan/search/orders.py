# SPDX-License-Identifier: Apache-2.0
"""Orders of every rank's micro-batches: the start of a search.

*State*: the order of each rank, which no other rank has to do with. *Objective*: its makespan.

1. Where micro-batches are few, all orders are simulated; else ascending, descending, small at both
   ends and large at both ends.
2. *Moves*: two micro-batches change places, all pairs or near ones as far as the effort goes. Every
   rank takes the best one, and again, until none helps.

Shape legend: X candidates, O orders; a 2 as the last axis: forward and backward.
"""

from __future__ import annotations

import itertools

import numpy as np

from sparsebalance_megatron.plan.arrangement import Placement
from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search_effort import SearchEffort
from sparsebalance_megatron.plan.step_costs import StepCosts

_ALL_ORDERS_UNTIL = 4
"""Micro-batches of a rank."""
_MAX_EVALUATED_TIMES = 1 << 15
_GAIN = 1e-9


def in_best_orders(
    placement: Placement, costs: StepCosts, sample_2SC: np.ndarray, *, plan_ms: float
) -> Placement:
    """The placement with every rank's micro-batches in the best order found.

    A few orders are always tried; swaps while ``plan_ms`` buys effort.
    """
    orders = _Orders(placement, costs, sample_2SC, plan_ms)
    orders.improve()
    return tuple(
        tuple(rank[position] for position in order_M)
        for rank, order_M in zip(placement, orders.order_RM.tolist(), strict=True)
    )


class _Orders:
    def __init__(
        self, placement: Placement, costs: StepCosts, sample_2SC: np.ndarray, plan_ms: float
    ) -> None:
        self.costs = costs
        constant_C2 = costs.constant_2C.T
        sample_SC2 = np.stack(list(sample_2SC), axis=-1)
        micro_batches = list(itertools.chain.from_iterable(placement))
        first_J = np.cumsum([0, *map(len, micro_batches[:-1])])
        samples = np.fromiter(itertools.chain.from_iterable(micro_batches), np.int64)
        micro_batch_JC2 = np.add.reduceat(sample_SC2[samples], first_J, axis=0)
        grid = (len(placement), costs.job.micro_batches)
        self.micro_batch_RMC2 = constant_C2 + micro_batch_JC2.reshape(*grid, *constant_C2.shape)
        self.order_RM = np.tile(np.arange(grid[1]), (grid[0], 1))
        self.rank_operations = 2 * costs.job.micro_batches * costs.chunks
        self.effort = SearchEffort(plan_ms)
        self.every_R = np.arange(len(placement))

    def _simulate(self, micro_batch_XMC2: np.ndarray, ranks_X: np.ndarray) -> np.ndarray:
        """Makespans [X] of the ranks ``ranks_X`` with these micro-batches."""
        self.effort.spend(micro_batch_XMC2.size)
        alone_XM = unshared(*micro_batch_XMC2.shape[:2])
        return makespans_ms(
            self.costs.times_of(np.moveaxis(micro_batch_XMC2, -1, 0), ranks_X, alone_XM)
        )

    def improve(self) -> None:
        """Change the orders while that makes a makespan less."""
        if self.costs.job.pipeline_stages == 1 or self.costs.job.micro_batches == 1:
            return
        self.makespans_R = self._simulate(self.micro_batch_RMC2, self.every_R)
        self._take_best_order(self._orders())
        if self.costs.job.micro_batches <= _ALL_ORDERS_UNTIL:
            return
        while len(swaps_XM := self._swaps()):
            swaps_RXM = np.broadcast_to(swaps_XM, (len(self.every_R), *swaps_XM.shape))
            if not self._take_best_order(swaps_RXM):
                break

    def _affordable(self, pipelines_each: int) -> int:
        """Candidates of so many pipelines that one more call may simulate."""
        operations = pipelines_each * self.rank_operations
        return min(self.effort.affordable(operations), _MAX_EVALUATED_TIMES // operations)

    def _swaps(self) -> np.ndarray:
        """Orders that exchange two positions: all pairs, or near ones where those are too many."""
        positions = self.costs.job.micro_batches
        pairs = [(i, i + gap) for gap in range(1, positions) for i in range(positions - gap)]
        pairs = pairs[: self._affordable(len(self.every_R))]
        orders_XM = np.tile(np.arange(positions), (len(pairs), 1))
        for row, (i, j) in zip(orders_XM, pairs, strict=True):
            row[[i, j]] = j, i
        return orders_XM

    def _orders(self) -> np.ndarray:
        """[R, O, M]: all orders of each rank where they are few.

        Else ascending, descending, small at both ends, large at both ends.
        """
        positions = self.costs.job.micro_batches
        if positions <= _ALL_ORDERS_UNTIL:
            every_OM = np.array(list(itertools.permutations(range(positions))))
            return np.broadcast_to(every_OM, (len(self.every_R), *every_OM.shape))
        up_RM = np.argsort(self.micro_batch_RMC2.sum(axis=(2, 3)), axis=1, kind="stable")
        down_RM = up_RM[:, ::-1]
        shapes = [up_RM, down_RM]
        for sorted_RM in (up_RM, down_RM):
            shapes.append(np.concatenate([sorted_RM[:, ::2], sorted_RM[:, 1::2][:, ::-1]], axis=1))
        return np.stack(shapes, axis=1)

    def _take_best_order(self, orders_ROM: np.ndarray) -> bool:
        orders = orders_ROM.shape[1]
        ordered = self.micro_batch_RMC2[self.every_R[:, None, None], orders_ROM]
        ordered = ordered.reshape(-1, *self.micro_batch_RMC2.shape[1:])
        ms_RO = self._simulate(ordered, np.repeat(self.every_R, orders)).reshape(-1, orders)
        best_R = ms_RO.argmin(axis=1)
        improved = np.flatnonzero(ms_RO[self.every_R, best_R] < self.makespans_R * (1 - _GAIN))
        for rank in improved.tolist():
            order_M = orders_ROM[rank, best_R[rank]]
            self.order_RM[rank] = self.order_RM[rank, order_M]
            self.micro_batch_RMC2[rank] = self.micro_batch_RMC2[rank, order_M]
            self.makespans_R[rank] = ms_RO[rank, best_R[rank]]
        return bool(len(improved))
