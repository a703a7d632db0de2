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

Shape legend: X contents, E pairs of rank groups, I moves, A micro-batches, Y = 2 micro-batches that
a move makes.
"""

import math
from dataclasses import dataclass
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
        from_I2: places where the micro-batches a and b begin.
        sample_I2: x of a, and y of b.
        place_IY: where the micro-batches begin that each makes.
        cp_size_IY: their ranks; 0 for none.
        has_IYX: their contents.
    """

    pair_I: np.ndarray
    kind_I: np.ndarray
    from_I2: np.ndarray
    sample_I2: np.ndarray
    place_IY: np.ndarray
    cp_size_IY: np.ndarray
    has_IYX: np.ndarray


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
        """So many moves in each pair of rank groups, less those that are not allowed."""
        state, positions = self._state, self._state.positions
        pair_E = np.full(state.ranks // self._rules.group_ranks, -1)
        pair_E[groups_E2] = np.arange(len(groups_E2))[:, None]
        size_J = state.size_J
        begins_A = np.flatnonzero(size_J)
        pair_A = pair_E[begins_A // (positions * self._rules.group_ranks)]
        order_A = np.argsort(pair_A, kind="stable")
        begins_A = begins_A[order_A]
        edges = np.searchsorted(pair_A[order_A], np.arange(len(groups_E2) + 1))

        pair_I = np.repeat(np.arange(len(groups_E2)), each)
        numbers_5I = self._numbers.draw(5 * len(pair_I)).reshape(5, -1)
        kind_I = np.searchsorted(self._until, below(1 << 20, numbers_5I[0]) / (1 << 20), "right")
        first_I1, count_I1 = edges[pair_I, None], np.diff(edges)[pair_I, None]
        from_I2 = begins_A[first_I1 + below(count_I1, numbers_5I[1:3].T)]
        # Samples by micro-batch, the heaviest first.
        order_S = self._by_weight_S[np.argsort(state.place_S[self._by_weight_S], kind="stable")]
        start_J = np.cumsum(size_J) - size_J
        sample_I2 = order_S[start_J[from_I2] + below(size_J[from_I2], numbers_5I[3:].T)]
        merges = np.flatnonzero(kind_I == Kind.MERGE)
        rank, position = np.divmod(from_I2[merges, 0], positions)
        beside = (rank ^ state.cp_size_J[from_I2[merges, 0]]) * positions + position
        from_I2[merges, 1] = np.where(beside < len(size_J), beside, from_I2[merges, 0])
        some_I = np.flatnonzero(self._possible_I(kind_I, from_I2, size_J))
        from_I2 = from_I2[some_I]
        moves = Moves(
            pair_I=pair_I[some_I],
            kind_I=kind_I[some_I],
            from_I2=from_I2,
            sample_I2=sample_I2[some_I],
            place_IY=from_I2.copy(),
            cp_size_IY=state.cp_size_J[from_I2],
            has_IYX=state.has_JX[from_I2],
        )
        self._make(moves, order_S, start_J)
        fine_I = self._rules.allow_I(moves.cp_size_IY, moves.has_IYX)
        return Moves(**{name: values_I[fine_I] for name, values_I in vars(moves).items()})

    def _possible_I(
        self, kind_I: np.ndarray, from_I2: np.ndarray, size_J: np.ndarray
    ) -> np.ndarray:
        """Mask of the kinds of moves that their micro-batches can make."""
        rank_I2, position_I2 = np.divmod(from_I2, self._state.positions)
        group_I2, cp_size_I2 = rank_I2 // self._rules.group_ranks, self._state.cp_size_J[from_I2]
        differ_I, cp_sizes_differ_I, groups_differ_I, positions_differ_I = (
            of_I2[:, 0] != of_I2[:, 1] for of_I2 in (from_I2, cp_size_I2, group_I2, position_I2)
        )
        several_I = size_J[from_I2[:, 0]] > 1
        exchange_I = np.where(groups_differ_I, ~cp_sizes_differ_I, positions_differ_I)
        merge_I = differ_I & ~cp_sizes_differ_I & (size_J[from_I2[:, 1]] > 0)
        halve_I = (cp_size_I2[:, 0] > 1) & several_I
        choices = [differ_I, differ_I & several_I, exchange_I, merge_I, halve_I]
        return np.choose(kind_I, choices).astype(bool)

    def _make(self, moves: Moves, order_S: np.ndarray, start_J: np.ndarray) -> None:
        """Change the micro-batches that moves hold, a and b, to those that they make."""
        state, sample_SX = self._state, self._state.contents.of_sample_SX
        positions, merge, halve = (
            np.flatnonzero(moves.kind_I == kind)
            for kind in (Kind.POSITIONS, Kind.MERGE, Kind.HALVE)
        )
        has_IYX, cp_size_IY = moves.has_IYX, moves.cp_size_IY
        some = np.flatnonzero(moves.kind_I <= Kind.JOIN)
        swaps_I1 = moves.kind_I[some, None] == Kind.SWAP
        x_I, y_I = moves.sample_I2[some].T
        gained_IX = swaps_I1 * sample_SX[y_I] - sample_SX[x_I]
        has_IYX[some, 0] += gained_IX
        has_IYX[some, 1] -= gained_IX
        has_IYX[positions] = has_IYX[positions, ::-1]
        if len(merge):
            has_IYX[merge, 0] += has_IYX[merge, 1]
            moves.place_IY[merge, 0] = moves.from_I2[merge].min(axis=1)
            cp_size_IY[merge] *= (2, 0)
        if len(halve):
            # Contents of the second of every two samples of a micro-batch.
            number_S = np.arange(len(order_S)) - start_J[state.place_S[order_S]]
            second_S = order_S[number_S % 2 == 1]
            second_JX = np.zeros_like(state.has_JX)
            np.add.at(second_JX, state.place_S[second_S], sample_SX[second_S])
            has_IYX[halve, 1] = second_JX[moves.from_I2[halve, 0]]
            has_IYX[halve, 0] -= has_IYX[halve, 1]
            cp_size_IY[halve] = cp_size_IY[halve, :1] // 2
            reached_I = cp_size_IY[halve, 0] * state.positions
            moves.place_IY[halve, 1] = moves.from_I2[halve, 0] + reached_I

    def apply(self, moves: Moves, move: int, ms_IYF: np.ndarray) -> None:
        """Make a move.

        Args:
            ms_IYF: times of the micro-batches that moves make.
        """
        state, kind = self._state, Kind(int(moves.kind_I[move]))
        (a, b), (x, y) = moves.from_I2[move].tolist(), moves.sample_I2[move].tolist()
        members = self._rules.group_ranks
        first, of_b = (of // state.positions // members * members for of in (a, b))
        if kind is Kind.POSITIONS and first == of_b:
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


def below(limit: np.ndarray | int, drawn: np.ndarray) -> np.ndarray:
    """Drawn numbers as those from 0 to below the limit, int64."""
    return np.asarray((drawn >> np.uint64(33)).astype(np.int64) % limit)
