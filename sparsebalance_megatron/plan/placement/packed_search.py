# SPDX-License-Identifier: Apache-2.0
"""Local search for pipelines whose micro-batches hold several samples.

Every round puts the ranks into pairs at random, draws moves within each pair, simulates all of them
at once and takes the best of each pair, if it is better or hardly worse; what counts as hardly
falls to nothing. So all ranks improve, not only the slowest: what others save is room for it.

Shape legend: R data-parallel ranks, M micro-batches of a rank, J = R x M, S samples, C chunks,
F = 2 C: forward, then backward of every chunk; X moves, E pairs of ranks, 2 the ranks of a pair.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.placement.cp_size_moves import Numbers
from sparsebalance_megatron.plan.search_effort import SearchEffort
from sparsebalance_megatron.plan.step_costs import StepCosts

_DRAWN = 48
"""Moves per pair and round."""
_ROUND_OPERATIONS = 100_000
"""Cost of a round beside its simulation: many calls of numpy on short arrays."""
_FIRST_TOLERANCE, _LAST_TOLERANCE = 2e-3, 6e-5
"""Share by which a move may lengthen its pair, at the beginning and at the end of a search."""
_WEIGHT_OF_MEAN = 0.3
"""Weight of a pair's mean makespan beside the larger one."""
_IDLE_ROUNDS = 400
"""Rounds without a gain after which the search ends."""
_SWAP, _JOIN, _POSITIONS = range(3)
"""Samples x and y change places; x joins y; the micro-batches of both do."""
_UNTIL = (0.5, 0.8)
"""Share of swaps among moves, and of swaps and joins."""


@dataclass(frozen=True, kw_only=True)
class _Moves:
    """Sample x is in micro-batch a, y in b, both in one pair; a gains what b loses."""

    pair_X: np.ndarray
    kind_X: np.ndarray
    x_X: np.ndarray
    y_X: np.ndarray
    a_X: np.ndarray
    b_X: np.ndarray
    gained_XF: np.ndarray
    tokens_X: np.ndarray

    def of(self, chosen_X: np.ndarray) -> _Moves:
        return _Moves(**{name: values[chosen_X] for name, values in vars(self).items()})


def improve_packed(
    start: Placement,
    costs: StepCosts,
    sample_2SC: np.ndarray,
    *,
    cap_tokens: int,
    plan_ms: float,
) -> Placement:
    """Trade samples and positions while ``plan_ms`` buys effort; never a longer step."""
    return _PackedSearch(start, costs, sample_2SC, cap_tokens, plan_ms).best()


class _PackedSearch:
    def __init__(
        self,
        start: Placement,
        costs: StepCosts,
        sample_2SC: np.ndarray,
        cap_tokens: int,
        plan_ms: float,
    ) -> None:
        self.costs, self.cap_tokens, self.effort = costs, cap_tokens, SearchEffort(plan_ms)
        self.ranks, self.many, self.numbers = len(start), len(start[0]), Numbers()
        self.place_S = Arrangement.of_groups(start).micro_batch_of_S
        self.tokens_S, places = costs.lengths_tokens_S, costs.job.places
        self.ms_SF = np.concatenate(list(sample_2SC), axis=1)
        self.ms_JF = np.tile(costs.constant_2C.ravel(), (places, 1))
        np.add.at(self.ms_JF, self.place_S, self.ms_SF)
        self.tokens_J = np.zeros(places, np.int64)
        np.add.at(self.tokens_J, self.place_S, self.tokens_S)
        self.size_J = np.bincount(self.place_S, minlength=places)
        self.ms_R = self._simulate(self._ms_RMF, np.arange(self.ranks))

    @property
    def _ms_RMF(self) -> np.ndarray:
        return self.ms_JF.reshape(self.ranks, self.many, -1)

    def _simulate(self, ms_XMF: np.ndarray, ranks_X: np.ndarray) -> np.ndarray:
        """[X] makespans of the ranks ``ranks_X`` with these micro-batches."""
        self.effort.spend(ms_XMF.size)
        ms_2XMC = np.stack(np.split(ms_XMF, 2, axis=-1))
        return makespans_ms(self.costs.times_of(ms_2XMC, ranks_X, unshared(*ms_XMF.shape[:2])))

    def best(self) -> Placement:
        """The placement with the shortest step of all rounds."""
        best, best_S, idle = (self.ms_R.max(), self.ms_R.sum()), self.place_S.copy(), 0
        each = _DRAWN * max(2, self.ranks) * self._ms_RMF[0].size + _ROUND_OPERATIONS
        while idle < _IDLE_ROUNDS and self.effort.affordable(each):
            self._round()
            found = (self.ms_R.max(), self.ms_R.sum())
            idle += 1
            if found < best:
                best, best_S, idle = found, self.place_S.copy(), 0
        held = [tuple(np.flatnonzero(best_S == place).tolist()) for place in range(len(self.ms_JF))]
        return tuple(
            tuple(held[first : first + self.many]) for first in range(0, len(held), self.many)
        )

    def _round(self) -> None:
        """Take the best of the moves drawn in every pair, where it is good enough."""
        self.effort.spend(_ROUND_OPERATIONS)
        pairs = max(1, self.ranks // 2)
        order_R = np.argsort(self.numbers.draw(self.ranks))
        # A single rank is a pair with itself; of an odd number one waits for the next round.
        ranks_E2 = order_R[np.arange(2 * pairs) % self.ranks].reshape(pairs, 2)
        moves = self._drawn(ranks_E2)
        if not len(moves.pair_X):
            return
        ranks_X2 = ranks_E2[moves.pair_X]
        ms_X2MF = self._ms_RMF[ranks_X2]
        for place_X, sign in ((moves.a_X, 1.0), (moves.b_X, -1.0)):
            rank_X, position_X = np.divmod(place_X, self.many)
            second_X = (rank_X != ranks_X2[:, 0]).astype(np.int64)
            ms_X2MF[np.arange(len(rank_X)), second_X, position_X] += sign * moves.gained_XF
        if self.ranks == 1:
            ms_X2MF[:, 1] = ms_X2MF[:, 0]
        ms_XMF = ms_X2MF.reshape(-1, *ms_X2MF.shape[2:])
        ms_X2 = self._simulate(ms_XMF, ranks_X2.ravel()).reshape(-1, 2)
        score_X = _score(ms_X2)
        limit_E = _score(self.ms_R[ranks_E2]) * (1.0 + self._tolerance())
        order_X = np.lexsort((score_X, moves.pair_X))
        best_E = order_X[np.unique(moves.pair_X[order_X], return_index=True)[1]]
        best_E = best_E[score_X[best_E] < limit_E[moves.pair_X[best_E]]]
        self.ms_R[ranks_X2[best_E]] = ms_X2[best_E]
        self._apply(moves.of(best_E))

    def _drawn(self, ranks_E2: np.ndarray) -> _Moves:
        """Moves that obey the cap and leave no micro-batch empty."""
        pair_R = np.full(self.ranks, -1)
        pair_R[ranks_E2] = np.arange(len(ranks_E2))[:, None]
        pair_S = pair_R[self.place_S // self.many]
        order_S = np.argsort(pair_S, kind="stable")
        edges = np.searchsorted(pair_S[order_S], np.arange(len(ranks_E2) + 1))
        pair_X = np.repeat(np.arange(len(ranks_E2)), _DRAWN)
        size_X = np.diff(edges)[pair_X]
        x_X, y_X = (
            order_S[edges[pair_X] + self.numbers.below(size_X, len(pair_X))] for _ in range(2)
        )
        kind_X = np.searchsorted(_UNTIL, self.numbers.below(1 << 20, len(x_X)) / (1 << 20))
        a_X, b_X = self.place_S[x_X], self.place_S[y_X]

        def gained(of_S: np.ndarray, of_J: np.ndarray) -> np.ndarray:
            kinds = [of_S[y_X] - of_S[x_X], -of_S[x_X], of_J[b_X] - of_J[a_X]]
            return np.asarray(np.stack(kinds)[kind_X, np.arange(len(x_X))])

        tokens_X = gained(self.tokens_S, self.tokens_J)
        fits_X = (self.tokens_J[a_X] + tokens_X <= self.cap_tokens) & (
            self.tokens_J[b_X] - tokens_X <= self.cap_tokens
        )
        moves = _Moves(
            pair_X=pair_X,
            kind_X=kind_X,
            **{"x_X": x_X, "y_X": y_X, "a_X": a_X, "b_X": b_X},
            gained_XF=gained(self.ms_SF, self.ms_JF),
            tokens_X=tokens_X,
        )
        return moves.of(fits_X & (a_X != b_X) & ((kind_X != _JOIN) | (self.size_J[a_X] > 1)))

    def _apply(self, moves: _Moves) -> None:
        """Make moves of different pairs."""
        a_X, b_X = moves.a_X, moves.b_X
        self.ms_JF[a_X] += moves.gained_XF
        self.ms_JF[b_X] -= moves.gained_XF
        self.tokens_J[a_X] += moves.tokens_X
        self.tokens_J[b_X] -= moves.tokens_X
        for kind, x, y, a, b in zip(moves.kind_X, moves.x_X, moves.y_X, a_X, b_X, strict=True):
            one = self.place_S == a if kind == _POSITIONS else x
            other = self.place_S == b if kind == _POSITIONS else y
            if kind != _JOIN:
                self.place_S[other] = a
            self.place_S[one] = b
        self.size_J = np.bincount(self.place_S, minlength=len(self.size_J))

    def _tolerance(self) -> float:
        return float(_LAST_TOLERANCE * (_FIRST_TOLERANCE / _LAST_TOLERANCE) ** self.effort.left)


def _score(ms_X2: np.ndarray) -> np.ndarray:
    return np.asarray(ms_X2.max(axis=1) + _WEIGHT_OF_MEAN * ms_X2.mean(axis=1))
