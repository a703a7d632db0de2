# SPDX-License-Identifier: Apache-2.0
"""Local search over a placement: the order of micro-batches in a rank, and exchanges between ranks.

Every round simulates many neighbours at once and takes the best one; only moves that lower a
simulated makespan are taken, so the result is never worse. What is simulated is limited by an
:class:`SearchEffort`, a count and not a clock.

Shape legend: S samples, R data-parallel ranks, P pipeline stages, V virtual stages,
M micro-batches, C = P x V chunks, J = R x M micro-batches, X candidates, O orders, I samples of a
rank; a 2 as the last axis: forward and backward; in ``ms_2X``: of the slowest rank and of the other
one.
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
_MAX_MEMBERS = 64
_MAX_EVALUATED_TIMES = 1 << 15
_GAIN = 1e-9


def improve(
    placement: Placement,
    costs: StepCosts,
    sample_2SC: np.ndarray,
    *,
    cap_tokens: int,
    plan_ms: float,
) -> Placement:
    """Order the micro-batches of every rank, then trade samples with the slowest rank and order
    again.

    A few orders of every rank are always tried; all else lasts while ``plan_ms`` buys effort.
    """
    search = _Search(placement, costs, sample_2SC, cap_tokens, plan_ms)
    search.order()
    while search.exchange():
        search.order()
    return tuple(tuple(tuple(sorted(micro_batch)) for micro_batch in rank) for rank in search.ranks)


class _Search:
    def __init__(
        self,
        placement: Placement,
        costs: StepCosts,
        sample_2SC: np.ndarray,
        cap_tokens: int,
        plan_ms: float,
    ) -> None:
        self.ranks = [[list(micro_batch) for micro_batch in rank] for rank in placement]
        self.costs, self.cap_tokens = costs, cap_tokens
        self.tokens_S = costs.lengths_tokens_S
        self.sample_SC2 = np.stack(list(sample_2SC), axis=-1)
        constant_C2 = costs.constant_2C.T
        sizes = [len(micro_batch) for rank in self.ranks for micro_batch in rank]
        samples = np.array([s for rank in self.ranks for micro_batch in rank for s in micro_batch])
        first_J = np.cumsum([0, *sizes[:-1]])
        micro_batch_JC2 = np.add.reduceat(self.sample_SC2[samples], first_J, axis=0)
        grid = (len(self.ranks), costs.job.micro_batches)
        self.micro_batch_RMC2 = constant_C2 + micro_batch_JC2.reshape(*grid, *constant_C2.shape)
        self.used_RM = np.add.reduceat(self.tokens_S[samples], first_J).reshape(grid)
        self.rank_operations = 2 * costs.job.micro_batches * costs.chunks
        self.effort = SearchEffort(plan_ms)
        self.every_R = np.arange(len(self.ranks))
        self.makespans_R = self._simulate(self.micro_batch_RMC2, self.every_R)

    def _simulate(self, micro_batch_XMC2: np.ndarray, ranks_X: np.ndarray) -> np.ndarray:
        """Makespans [X] of the ranks ``ranks_X`` with these micro-batches."""
        self.effort.spend(micro_batch_XMC2.size)
        alone_XM = unshared(*micro_batch_XMC2.shape[:2])
        return makespans_ms(
            self.costs.times_of(np.moveaxis(micro_batch_XMC2, -1, 0), ranks_X, alone_XM)
        )

    @property
    def _order_matters(self) -> bool:
        return self.costs.job.pipeline_stages > 1 and self.costs.job.micro_batches > 1

    def _affordable(self, pipelines_each: int) -> int:
        """Candidates of so many pipelines that one more call may simulate."""
        operations = pipelines_each * self.rank_operations
        return min(self.effort.affordable(operations), _MAX_EVALUATED_TIMES // operations)

    def order(self) -> None:
        """Best of all orders where they are few; else of a few shapes, then of pairwise swaps."""
        if not self._order_matters:
            return
        self._take_best_order(self._orders())
        if self.costs.job.micro_batches <= _ALL_ORDERS_UNTIL:
            return
        while len(swaps_XM := self._swaps()):
            swaps_RXM = np.broadcast_to(swaps_XM, (len(self.ranks), *swaps_XM.shape))
            if not self._take_best_order(swaps_RXM):
                break

    def _swaps(self) -> np.ndarray:
        """Orders that exchange two positions: all pairs, or near ones where those are too many."""
        positions = self.costs.job.micro_batches
        pairs = [(i, i + gap) for gap in range(1, positions) for i in range(positions - gap)]
        pairs = pairs[: self._affordable(len(self.ranks))]
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
            return np.broadcast_to(every_OM, (len(self.ranks), *every_OM.shape))
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
            self.ranks[rank] = [self.ranks[rank][position] for position in order_M.tolist()]
            self.micro_batch_RMC2[rank] = self.micro_batch_RMC2[rank, order_M]
            self.used_RM[rank] = self.used_RM[rank, order_M]
            self.makespans_R[rank] = ms_RO[rank, best_R[rank]]
        return bool(len(improved))

    def exchange(self) -> bool:
        """Trade samples between the slowest rank and others while that helps."""
        changed = False
        while len(self.ranks) > 1:
            moves = self._moves(int(self.makespans_R.argmax()))
            if not len(moves) or not self._take_best_move(moves):
                break
            changed = True
        return changed

    def _moves(self, slow: int) -> np.ndarray:
        """Moves (slow rank, micro-batch, sample, other rank, micro-batch, sample or -1) that obey
        cap and micro-batches.

        -1 takes nothing in return, from a micro-batch that keeps other samples. Partners in the
        fastest ranks come first; what is too much to simulate at once is left out.
        """
        most = self._affordable(2)
        if not most:
            return np.empty((0, 6), dtype=np.int64)
        gives = self._members(slow, nothing=False)
        takes = np.empty((0, 3), dtype=np.int64)
        for other in np.argsort(self.makespans_R, kind="stable").tolist():
            if other != slow and len(gives) * len(takes) < 4 * most:
                takes = np.concatenate([takes, self._members(other, nothing=True)])
        pairs = np.indices((len(gives), len(takes))).reshape(2, -1)
        moves = np.concatenate([gives[pairs[0]], takes[pairs[1]]], axis=1)
        chosen = np.flatnonzero(self._legal(slow, moves))
        return moves[chosen[np.argsort(pairs[1][chosen], kind="stable")][:most]]

    def _legal(self, slow: int, moves: np.ndarray) -> np.ndarray:
        """Mask of moves that obey the cap and leave no micro-batch empty."""
        _, m, give, other, n, take = moves.T
        alone_M = np.array([len(micro_batch) == 1 for micro_batch in self.ranks[slow]])
        change = self.tokens_S[give] - np.where(take >= 0, self.tokens_S[take], 0)
        fits = (self.used_RM[other, n] + change <= self.cap_tokens) & (
            self.used_RM[slow, m] - change <= self.cap_tokens
        )
        return np.asarray(fits & ((take >= 0) | ~alone_M[m]))

    def _members(self, rank: int, *, nothing: bool) -> np.ndarray:
        """(rank, micro-batch, sample) of a rank's samples, [I, 3]; -1 per micro-batch for nothing.

        Of very many, some of every size: pairs of them must stay few.
        """
        rows = [
            (rank, m, sample)
            for m, micro_batch in enumerate(self.ranks[rank])
            for sample in micro_batch
        ]
        members_I3 = np.array(rows, dtype=np.int64)
        if len(members_I3) > _MAX_MEMBERS:
            by_size_I = np.argsort(self.tokens_S[members_I3[:, 2]], kind="stable")
            spread_I = np.linspace(0, len(by_size_I) - 1, _MAX_MEMBERS).astype(np.int64)
            members_I3 = members_I3[by_size_I[spread_I]]
        if not nothing:
            return members_I3
        empty_I3 = np.array([(rank, m, -1) for m in range(self.costs.job.micro_batches)])
        return np.concatenate([members_I3, empty_I3])

    def _take_best_move(self, moves: np.ndarray) -> bool:
        slow, m, give, other, n, take = moves.T
        taken = np.where((take >= 0)[:, None, None], self.sample_SC2[take], 0.0)
        difference = self.sample_SC2[give] - taken
        rows = np.arange(len(moves))
        slow_micro_batches, other_micro_batches = (
            self.micro_batch_RMC2[slow],
            self.micro_batch_RMC2[other],
        )
        slow_micro_batches[rows, m] -= difference
        other_micro_batches[rows, n] += difference
        both = np.concatenate([slow_micro_batches, other_micro_batches])
        ms_2X = self._simulate(both, np.concatenate([slow, other])).reshape(2, -1)
        best = int(ms_2X.max(axis=0).argmin())
        if ms_2X[:, best].max() >= self.makespans_R[slow[0]] * (1 - _GAIN):
            return False
        self._apply(moves[best].tolist(), slow_micro_batches[best], other_micro_batches[best])
        self.makespans_R[[slow[best], other[best]]] = ms_2X[:, best]
        return True

    def _apply(self, move: list[int], slow_MC2: np.ndarray, other_MC2: np.ndarray) -> None:
        slow, m, give, other, n, take = move
        self.ranks[slow][m].remove(give)
        self.ranks[other][n].append(give)
        tokens = self.tokens_S[give]
        if take >= 0:
            self.ranks[other][n].remove(take)
            self.ranks[slow][m].append(take)
            tokens = tokens - self.tokens_S[take]
        self.used_RM[slow, m] -= tokens
        self.used_RM[other, n] += tokens
        self.micro_batch_RMC2[slow], self.micro_batch_RMC2[other] = slow_MC2, other_MC2
