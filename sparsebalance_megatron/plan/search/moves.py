# SPDX-License-Identifier: Apache-2.0
"""Neighbours of a placement, drawn many at a time within pairs of rank groups.

A rank group is as many neighbouring ranks as may share a micro-batch or wait for one another in
every layer. A move changes one or two micro-batches a and b of its pair:

- *Swap*: sample x of a and sample y of b change places.
- *Join*: sample x of a goes to b.
- *Positions*: all ranks of the group of a and b exchange two positions; where a and b are of
  different groups and as many ranks share both, a and b change places.
- *Merge*: a and the micro-batch beside it, of as many ranks, become one of all their ranks.
- *Halve*: a becomes two micro-batches on half of its ranks each, with every second of its samples
  by weight.

Shape legend: J places, X contents, E pairs of rank groups, I moves, A micro-batches, Y = 2
micro-batches that a move makes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from sparsebalance_megatron.plan.search.state import BLOCKS, SEQUENCES, TOKENS, Numbers, State


class Kind(IntEnum):
    """Ways in which a move changes micro-batches."""

    SWAP = 0
    JOIN = 1
    POSITIONS = 2
    MERGE = 3
    HALVE = 4


_OVERDRAWN = 2
"""Moves drawn per wanted move: many are not allowed."""
_SHARES_ALONE = (0.5, 0.3, 0.2, 0.0, 0.0)
_SHARES = (0.36, 0.18, 0.14, 0.14, 0.18)
"""Shares of the kinds among the moves drawn, where every rank runs its micro-batches alone, and
where ranks may share them."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits of micro-batches that moves make: tokens per rank, and the most ranks that share one.

    Every rank that shares a micro-batch has a block of it. ``lockstep_ranks`` wait for one another
    in every layer.
    """

    cap_tokens: int
    max_cp_size: int = 1
    lockstep_ranks: int = 1

    @property
    def group_ranks(self) -> int:
        """Ranks of a rank group: no rank has to do with one outside it."""
        return math.lcm(self.max_cp_size, self.lockstep_ranks)

    def allow_I(self, cp_size_IY: np.ndarray, has_IYX: np.ndarray) -> np.ndarray:
        """Mask of moves whose micro-batches obey; cp_size 0 makes none."""
        fine_IY = (
            (has_IYX[..., SEQUENCES] > 0)
            & (has_IYX[..., TOKENS] <= self.cap_tokens * cp_size_IY)
            & ((has_IYX[..., BLOCKS] >= cp_size_IY) | (cp_size_IY == 1))
            & (cp_size_IY <= self.max_cp_size)
        )
        return np.asarray((fine_IY | (cp_size_IY == 0)).all(axis=1))


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Moves of a state.

    Attributes:
        pair_I: the pair of rank groups that each changes.
        kind_I: a :class:`Kind`.
        a_I, b_I: places where the micro-batches begin.
        x_I, y_I: samples.
        place_IY: where the micro-batches begin that each makes.
        cp_size_IY: their ranks; 0 for none.
        has_IYX: their contents.
    """

    pair_I: np.ndarray
    kind_I: np.ndarray
    a_I: np.ndarray
    b_I: np.ndarray
    x_I: np.ndarray
    y_I: np.ndarray
    place_IY: np.ndarray
    cp_size_IY: np.ndarray
    has_IYX: np.ndarray

    def subset(self, chosen_I: np.ndarray) -> Moves:
        """Some of the moves."""
        return replace(self, **{name: values[chosen_I] for name, values in vars(self).items()})


class Drawing:
    """Draws moves of a state.

    Args:
        weights_S: ms of every sample; a micro-batch is halved by them.
    """

    def __init__(self, state: State, weights_S: np.ndarray, rules: Rules, numbers: Numbers) -> None:
        self._state, self._rules, self._numbers = state, rules, numbers
        self._by_weight_S = np.argsort(-weights_S, kind="stable")
        self._until = np.cumsum(_SHARES if rules.max_cp_size > 1 else _SHARES_ALONE)[:-1]

    def draw(self, groups_E2: np.ndarray, each: int) -> Moves:
        """At most so many allowed moves in each pair of rank groups."""
        state, numbers = self._state, self._numbers
        members, positions = self._rules.group_ranks, state.positions
        pair_E = np.full(state.ranks // members, -1)
        pair_E[groups_E2] = np.arange(len(groups_E2))[:, None]
        size_J = state.size_J
        begins_A = np.flatnonzero(size_J)
        pair_A = pair_E[begins_A // (positions * members)]
        begins_A = begins_A[np.argsort(pair_A, kind="stable")]
        edges = np.searchsorted(np.sort(pair_A), np.arange(len(groups_E2) + 1))

        pair_I = np.repeat(np.arange(len(groups_E2)), _OVERDRAWN * each)
        draws = len(pair_I)
        kind_I = np.searchsorted(
            self._until, numbers.below(1 << 20, draws) / (1 << 20), side="right"
        )
        count_I = np.diff(edges)[pair_I]
        a_I, b_I = (begins_A[edges[pair_I] + numbers.below(count_I, draws)] for _ in range(2))
        # Samples by micro-batch, the heaviest first.
        order_S = self._by_weight_S[np.argsort(state.place_S[self._by_weight_S], kind="stable")]
        start_J = np.cumsum(size_J) - size_J
        x_I, y_I = (
            order_S[start_J[of_I] + numbers.below(size_J[of_I], draws)] for of_I in (a_I, b_I)
        )
        cp_size_J = state.cp_size_J
        beside_I = (a_I // positions ^ cp_size_J[a_I]) * positions + a_I % positions
        merges_I = kind_I == Kind.MERGE
        inside_I = beside_I < len(cp_size_J)
        b_I = np.where(merges_I, np.where(inside_I, beside_I, a_I), b_I)
        moves = Moves(
            pair_I=pair_I,
            kind_I=kind_I,
            **{"a_I": a_I, "b_I": b_I, "x_I": x_I, "y_I": y_I},
            place_IY=np.stack([a_I, b_I], axis=1),
            cp_size_IY=np.stack([cp_size_J[a_I], cp_size_J[b_I]], axis=1),
            has_IYX=np.empty((draws, 0, 0)),
        )
        moves = moves.subset(self._possible_I(moves, size_J))
        return _first_of_each_pair(self._made(moves, order_S, start_J), each)

    def _possible_I(self, moves: Moves, size_J: np.ndarray) -> np.ndarray:
        """Mask of the kinds of moves that their micro-batches can make."""
        a_I, b_I, one_I, other_I = moves.a_I, moves.b_I, *moves.cp_size_IY.T
        positions = self._state.positions
        group_a_I, group_b_I = (
            of_I // (positions * self._rules.group_ranks) for of_I in (a_I, b_I)
        )
        exchange_I = np.where(
            group_a_I == group_b_I, a_I % positions != b_I % positions, one_I == other_I
        )
        merge_I = (a_I != b_I) & (one_I == other_I) & (size_J[b_I] > 0)
        halve_I = (one_I > 1) & (size_J[a_I] > 1)
        choices = [a_I != b_I, (a_I != b_I) & (size_J[a_I] > 1), exchange_I, merge_I, halve_I]
        return np.choose(moves.kind_I, choices).astype(bool)

    def _made(self, moves: Moves, order_S: np.ndarray, start_J: np.ndarray) -> Moves:
        """The moves that the rules allow, with the micro-batches that they make."""
        state, sample_SX = self._state, self._state.contents.of_sample_SX
        kind_I, a_I, b_I = moves.kind_I, moves.a_I, moves.b_I
        place_IY, cp_size_IY = moves.place_IY.copy(), moves.cp_size_IY.copy()
        has_a_IX, has_b_IX = state.has_JX[a_I], state.has_JX[b_I]
        gained_IX = np.zeros_like(has_a_IX)
        for kind, gained in (
            (Kind.SWAP, lambda of: sample_SX[moves.y_I[of]] - sample_SX[moves.x_I[of]]),
            (Kind.JOIN, lambda of: -sample_SX[moves.x_I[of]]),
            (Kind.POSITIONS, lambda of: has_b_IX[of] - has_a_IX[of]),
            (Kind.MERGE, lambda of: has_b_IX[of]),
        ):
            chosen = np.flatnonzero(kind_I == kind)
            gained_IX[chosen] = gained(chosen)
        merge = np.flatnonzero(kind_I == Kind.MERGE)
        place_IY[merge, 0] = np.minimum(a_I[merge], b_I[merge])
        cp_size_IY[merge] = np.stack([2 * cp_size_IY[merge, 0], 0 * merge], axis=1)
        halve = np.flatnonzero(kind_I == Kind.HALVE)
        if len(halve):
            # Contents of the second of every two samples of a micro-batch.
            number_S = np.arange(len(order_S)) - start_J[state.place_S[order_S]]
            second_S = order_S[number_S % 2 == 1]
            second_JX = np.zeros_like(state.has_JX)
            np.add.at(second_JX, state.place_S[second_S], sample_SX[second_S])
            gained_IX[halve] = -second_JX[a_I[halve]]
            half = cp_size_IY[halve, 0] // 2
            cp_size_IY[halve] = half[:, None]
            place_IY[halve, 1] = a_I[halve] + half * state.positions
            has_b_IX[halve] = 0.0
        made = replace(
            moves,
            place_IY=place_IY,
            cp_size_IY=cp_size_IY,
            has_IYX=np.stack([has_a_IX + gained_IX, has_b_IX - gained_IX], axis=1),
        )
        return made.subset(self._rules.allow_I(cp_size_IY, made.has_IYX))

    def apply(self, moves: Moves, move: int, ms_IYF: np.ndarray) -> None:
        """Make a move.

        Args:
            ms_IYF: times of the micro-batches that moves make.
        """
        state, kind = self._state, Kind(int(moves.kind_I[move]))
        a, b, x, y = (int(of[move]) for of in (moves.a_I, moves.b_I, moves.x_I, moves.y_I))
        members = self._rules.group_ranks
        if kind is Kind.POSITIONS and same_group(state, a, b, members):
            first = a // state.positions // members * members
            state.exchange_positions(
                slice(first, first + members), a % state.positions, b % state.positions
            )
            return
        in_a_S, in_b_S = state.place_S == a, state.place_S == b
        if kind is Kind.HALVE:
            order_S = self._by_weight_S[in_a_S[self._by_weight_S]]
            state.place_S[order_S[1::2]] = moves.place_IY[move, 1]
        elif kind is Kind.MERGE:
            state.place_S[in_a_S | in_b_S] = moves.place_IY[move, 0]
        elif kind is Kind.POSITIONS:
            state.place_S[in_a_S], state.place_S[in_b_S] = b, a
        else:
            state.place_S[x] = b
            if kind is Kind.SWAP:
                state.place_S[y] = a
        for made in range(2):
            if cp_size := int(moves.cp_size_IY[move, made]):
                place = int(moves.place_IY[move, made])
                state.put(place, cp_size, moves.has_IYX[move, made], ms_IYF[move, made])


def _first_of_each_pair(moves: Moves, most: int) -> Moves:
    """At most so many moves of each pair; they are sorted by pair."""
    number_I = np.arange(len(moves.pair_I)) - np.searchsorted(moves.pair_I, moves.pair_I)
    return moves.subset(number_I < most)


def same_group(state: State, a: int, b: int, members: int) -> bool:
    """Whether two places are of one rank group."""
    return a // state.positions // members == b // state.positions // members
