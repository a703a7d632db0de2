# SPDX-License-Identifier: Apache-2.0
"""Local search over a placement: the order of slots in a rank, and exchanges between ranks.

Every round simulates all neighbours at once and takes the best one; only moves that lower a
simulated makespan are taken, so the result is never worse.

Shape legend: S samples, D ranks, M micro-batches, C = P x V chunks, P stages, V chunks, X
candidates.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.batching import Placement
from sparsebalance_megatron.plan.latency import StepCosts
from sparsebalance_megatron.plan.pipeline import makespans_ms

_ORDER_ROUNDS = 6
_EXCHANGE_ROUNDS = 12
_MAX_EVALUATED_TIMES = 1 << 14
_GAIN = 1e-9


def improve(
    placement: Placement,
    costs: StepCosts,
    sample_forward_SC: np.ndarray,
    sample_backward_SC: np.ndarray,
    *,
    cap_tokens: int,
    schedule: str,
) -> Placement:
    """Order the slots of every rank, exchange samples with the slowest rank, order again."""
    search = _Search(placement, costs, sample_forward_SC, sample_backward_SC, cap_tokens, schedule)
    search.order()
    if search.exchange():
        search.order()
    return tuple(tuple(tuple(sorted(slot)) for slot in rank) for rank in search.ranks)


class _Search:
    def __init__(
        self,
        placement: Placement,
        costs: StepCosts,
        sample_forward_SC: np.ndarray,
        sample_backward_SC: np.ndarray,
        cap_tokens: int,
        schedule: str,
    ) -> None:
        self.ranks = [[list(slot) for slot in rank] for rank in placement]
        self.costs, self.cap_tokens, self.schedule = costs, cap_tokens, schedule
        self.tokens_S = costs.lengths_tokens_S
        self.sample_SC2 = np.stack([sample_forward_SC, sample_backward_SC], axis=-1)
        constant_C2 = np.stack([costs.constant_forward_C, costs.constant_backward_C], axis=-1)
        self.slot_DMC2 = constant_C2 + np.array(
            [[self.sample_SC2[slot].sum(axis=0) for slot in rank] for rank in self.ranks]
        )
        self.makespans_D = self._simulate(self.slot_DMC2)

    def _simulate(self, slot_XMC2: np.ndarray) -> np.ndarray:
        times = [self.costs.grid_DPVM(slot_XMC2[..., side]) for side in (0, 1)]
        return makespans_ms(*times, schedule=self.schedule)

    def order(self) -> None:
        """Best of a few shapes and of pairwise swaps, for all ranks at once."""
        if self.schedule == "no_pipeline":
            return
        swaps_DXM = self._swaps()
        orders_DXM = np.concatenate([self._shapes(), swaps_DXM], axis=1)
        for _ in range(_ORDER_ROUNDS):
            if not self._take_best_order(orders_DXM):
                break
            orders_DXM = swaps_DXM

    def _swaps(self) -> np.ndarray:
        """Orders that exchange two positions: all pairs, or near ones where those are too many."""
        positions = self.costs.micro_batches
        most = _MAX_EVALUATED_TIMES // (len(self.ranks) * positions * self.costs.chunks)
        pairs = [(i, i + gap) for gap in range(1, positions) for i in range(positions - gap)]
        orders_XM = np.tile(np.arange(positions), (max(1, min(len(pairs), most)), 1))
        for row, (i, j) in zip(orders_XM, pairs, strict=False):
            row[[i, j]] = j, i
        return np.broadcast_to(orders_XM, (len(self.ranks), *orders_XM.shape))

    def _shapes(self) -> np.ndarray:
        """Ascending, descending, small at both ends, large at both ends."""
        ascending_DM = np.argsort(self.slot_DMC2.sum(axis=(2, 3)), axis=1, kind="stable")
        small_outside_DM = np.concatenate(
            [ascending_DM[:, ::2], ascending_DM[:, 1::2][:, ::-1]], axis=1
        )
        large_outside_DM = np.concatenate(
            [ascending_DM[:, ::-1][:, ::2], ascending_DM[:, ::-1][:, 1::2][:, ::-1]], axis=1
        )
        shapes = [ascending_DM, ascending_DM[:, ::-1], small_outside_DM, large_outside_DM]
        return np.stack(shapes, axis=1)

    def _take_best_order(self, orders_DXM: np.ndarray) -> bool:
        ranks = np.arange(len(self.ranks))
        candidates = self.slot_DMC2[ranks[:, None, None], orders_DXM]
        ms_DX = self._simulate(candidates.reshape(-1, *self.slot_DMC2.shape[1:])).reshape(
            orders_DXM.shape[:2]
        )
        best_D = ms_DX.argmin(axis=1)
        improved = np.flatnonzero(ms_DX[ranks, best_D] < self.makespans_D * (1 - _GAIN))
        for rank in improved.tolist():
            order = orders_DXM[rank, best_D[rank]]
            self.ranks[rank] = [self.ranks[rank][position] for position in order]
            self.slot_DMC2[rank] = self.slot_DMC2[rank, order]
            self.makespans_D[rank] = ms_DX[rank, best_D[rank]]
        return bool(len(improved))

    def exchange(self) -> bool:
        """Trade samples between the slowest rank and the fastest ones while that helps."""
        changed = False
        for _ in range(_EXCHANGE_ROUNDS):
            moves = self._moves(int(self.makespans_D.argmax()))
            if not len(moves) or not self._take_best_move(moves):
                break
            changed = True
        return changed

    def _moves(self, slow: int) -> np.ndarray:
        """Moves (slow rank, slot, sample, other rank, slot, sample or -1) that obey cap and slots.

        -1 takes nothing in return, from a slot that keeps other samples. Partners in the fastest
        ranks come first; what is too much to simulate at once is left out.
        """
        most = max(1, _MAX_EVALUATED_TIMES // (2 * self.costs.micro_batches * self.costs.chunks))
        gives = self._members(slow, nothing=False)
        takes = np.empty((0, 3), dtype=np.int64)
        for other in np.argsort(self.makespans_D, kind="stable").tolist():
            if other != slow and len(gives) * len(takes) < 4 * most:
                takes = np.concatenate([takes, self._members(other, nothing=True)])
        pairs = np.indices((len(gives), len(takes))).reshape(2, -1)
        moves = np.concatenate([gives[pairs[0]], takes[pairs[1]]], axis=1)
        _, m, give, other, n, take = moves.T
        alone_M = np.array([len(slot) == 1 for slot in self.ranks[slow]])
        used_DM = np.array(
            [[self.tokens_S[slot].sum() for slot in rank] for rank in self.ranks], dtype=np.int64
        )
        change = self.tokens_S[give] - np.where(take >= 0, self.tokens_S[take], 0)
        legal = (used_DM[other, n] + change <= self.cap_tokens) & (
            used_DM[slow, m] - change <= self.cap_tokens
        )
        legal &= (take >= 0) | ~alone_M[m]
        chosen = np.flatnonzero(legal)
        return moves[chosen[np.argsort(pairs[1][chosen], kind="stable")][:most]]

    def _members(self, rank: int, *, nothing: bool) -> np.ndarray:
        """(rank, slot, sample) of all samples of a rank, [I, 3]; -1 per slot for nothing."""
        rows = [
            (rank, m, sample)
            for m, slot in enumerate(self.ranks[rank])
            for sample in ([*slot, -1] if nothing else slot)
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 3)

    def _take_best_move(self, moves: np.ndarray) -> bool:
        slow, m, give, other, n, take = moves.T
        taken = np.where((take >= 0)[:, None, None], self.sample_SC2[take], 0.0)
        difference = self.sample_SC2[give] - taken
        rows = np.arange(len(moves))
        slow_slots, other_slots = self.slot_DMC2[slow], self.slot_DMC2[other]
        slow_slots[rows, m] -= difference
        other_slots[rows, n] += difference
        ms_X = self._simulate(np.concatenate([slow_slots, other_slots])).reshape(2, -1)
        best = int(ms_X.max(axis=0).argmin())
        if ms_X[:, best].max() >= self.makespans_D[slow[0]] * (1 - _GAIN):
            return False
        self._apply(moves[best].tolist(), slow_slots[best], other_slots[best])
        self.makespans_D[[slow[best], other[best]]] = ms_X[:, best]
        return True

    def _apply(self, move: list[int], slow_MC2: np.ndarray, other_MC2: np.ndarray) -> None:
        slow, m, give, other, n, take = move
        self.ranks[slow][m].remove(give)
        self.ranks[other][n].append(give)
        if take >= 0:
            self.ranks[other][n].remove(take)
            self.ranks[slow][m].append(take)
        self.slot_DMC2[slow], self.slot_DMC2[other] = slow_MC2, other_MC2
