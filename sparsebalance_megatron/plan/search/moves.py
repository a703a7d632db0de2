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
        kind_I, *numbers_4I = self._numbers.draw(5 * len(pair_I)).reshape(5, -1)
        kind_I = np.searchsorted(self._until, below(1 << 20, kind_I) / (1 << 20), side="right")
        first_I, count_I = edges[pair_I], np.diff(edges)[pair_I]
        a_I, b_I = (begins_A[first_I + below(count_I, numbers_I)] for numbers_I in numbers_4I[:2])
        # Samples by micro-batch, the heaviest first.
        order_S = self._by_weight_S[np.argsort(state.place_S[self._by_weight_S], kind="stable")]
        start_J = np.cumsum(size_J) - size_J
        x_I, y_I = (
            order_S[start_J[of_I] + below(size_J[of_I], numbers_I)]
            for of_I, numbers_I in zip((a_I, b_I), numbers_4I[2:], strict=True)
        )
        cp_size_J = state.cp_size_J
        beside_I = (a_I // positions ^ cp_size_J[a_I]) * positions + a_I % positions
        merges_I = kind_I == Kind.MERGE
        inside_I = beside_I < len(cp_size_J)
        b_I = np.where(merges_I, np.where(inside_I, beside_I, a_I), b_I)
        possible_I = np.flatnonzero(self._possible_I(kind_I, a_I, b_I, size_J))
        drawn = {"pair_I": pair_I, "kind_I": kind_I, "a_I": a_I, "b_I": b_I, "x_I": x_I, "y_I": y_I}
        place_IY = np.stack([a_I, b_I], axis=1)[possible_I]
        moves = Moves(
            **{name: values_I[possible_I] for name, values_I in drawn.items()},
            place_IY=place_IY,
            cp_size_IY=cp_size_J[place_IY],
            has_IYX=state.has_JX[place_IY],
        )
        self._make(moves, order_S, start_J)
        fine_I = self._rules.allow_I(moves.cp_size_IY, moves.has_IYX)
        return Moves(**{name: values_I[fine_I] for name, values_I in vars(moves).items()})

    def _possible_I(
        self, kind_I: np.ndarray, a_I: np.ndarray, b_I: np.ndarray, size_J: np.ndarray
    ) -> np.ndarray:
        """Mask of the kinds of moves that their micro-batches can make."""
        positions = self._state.positions
        one_I, other_I = (self._state.cp_size_J[of_I] for of_I in (a_I, b_I))
        group_a_I, group_b_I = (
            of_I // (positions * self._rules.group_ranks) for of_I in (a_I, b_I)
        )
        differ_I, several_I, alike_I = a_I != b_I, size_J[a_I] > 1, one_I == other_I
        exchange_I = np.where(group_a_I == group_b_I, a_I % positions != b_I % positions, alike_I)
        merge_I = differ_I & alike_I & (size_J[b_I] > 0)
        choices = [differ_I, differ_I & several_I, exchange_I, merge_I, (one_I > 1) & several_I]
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
        gained_IX = swaps_I1 * sample_SX[moves.y_I[some]] - sample_SX[moves.x_I[some]]
        has_IYX[some, 0] += gained_IX
        has_IYX[some, 1] -= gained_IX
        has_IYX[positions] = has_IYX[positions, ::-1]
        if len(merge):
            has_IYX[merge, 0] += has_IYX[merge, 1]
            moves.place_IY[merge, 0] = np.minimum(moves.a_I[merge], moves.b_I[merge])
            cp_size_IY[merge] *= (2, 0)
        if len(halve):
            # Contents of the second of every two samples of a micro-batch.
            number_S = np.arange(len(order_S)) - start_J[state.place_S[order_S]]
            second_S = order_S[number_S % 2 == 1]
            second_JX = np.zeros_like(state.has_JX)
            np.add.at(second_JX, state.place_S[second_S], sample_SX[second_S])
            has_IYX[halve, 1] = second_JX[moves.a_I[halve]]
            has_IYX[halve, 0] -= has_IYX[halve, 1]
            cp_size_IY[halve] = cp_size_IY[halve, :1] // 2
            moves.place_IY[halve, 1] = moves.a_I[halve] + cp_size_IY[halve, 0] * state.positions

    def apply(self, moves: Moves, move: int, ms_IYF: np.ndarray) -> None:
        """Make a move.

        Args:
            ms_IYF: times of the micro-batches that moves make.
        """
        state, kind = self._state, Kind(int(moves.kind_I[move]))
        a, b, x, y = (int(of[move]) for of in (moves.a_I, moves.b_I, moves.x_I, moves.y_I))
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
