# SPDX-License-Identifier: Apache-2.0
"""Neighbours of a placement whose micro-batches differ in cp_size, drawn many at a time.

A move makes one or two micro-batches anew, in the place of others and from their samples, or
exchanges two positions of an island.

Shape legend: X moves drawn, J micro-batches of a :class:`.MicroBatchTable`, F contents, S samples,
Y = 2 micro-batches that a move makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from sparsebalance_megatron.plan.placement.shared_micro_batches import (
    BLOCKS,
    SEQUENCES,
    TOKENS,
    Contents,
    MicroBatchTable,
)

_OVERDRAWN = 3
"""Moves drawn per wanted move: many are not allowed."""


class Kind(IntEnum):
    """Ways in which a move changes micro-batches a and b, and samples x of a and y of b."""

    POSITIONS = 0
    """The island of a exchanges the positions of a and b."""
    TRADE = 1
    """a gives x to b, and takes y where that is a sample."""
    MERGE = 2
    """a and its buddy become one micro-batch."""
    HALVE = 3
    """a becomes two micro-batches on half of its ranks each, with every second of its samples by
    weight."""


_SHARES = {Kind.POSITIONS: 0.14, Kind.TRADE: 0.54, Kind.MERGE: 0.14, Kind.HALVE: 0.18}
_UNTIL = np.cumsum(list(_SHARES.values()))


class Numbers:
    """Numbers without a pattern, the same everywhere: a counter, mixed (splitmix64)."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, count: int) -> np.ndarray:
        """So many, uint64."""
        mixed = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))

    def below(self, limit: np.ndarray | int, count: int) -> np.ndarray:
        """So many from 0 to below the limit, int64."""
        drawn = self.draw(count) >> np.uint64(33)
        return np.asarray(drawn.astype(np.int64) % limit)


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Limits of micro-batches that moves make: tokens per rank, the largest cp_size, a block for
    every rank."""

    cap_tokens: int
    max_cp_size: int

    def allow_X(self, cp_size_XY: np.ndarray, contents_XYF: np.ndarray) -> np.ndarray:
        """Mask of moves whose micro-batches obey; cp_size 0 makes none."""
        fine_XY = (
            (contents_XYF[..., SEQUENCES] > 0)
            & (contents_XYF[..., TOKENS] <= self.cap_tokens * cp_size_XY)
            & ((contents_XYF[..., BLOCKS] >= cp_size_XY) | (cp_size_XY == 1))
            & (cp_size_XY <= self.max_cp_size)
        )
        return np.asarray((fine_XY | (cp_size_XY == 0)).all(axis=1))


@dataclass(frozen=True, kw_only=True)
class Moves:
    """Moves of a table's micro-batches.

    ``kind_X``, ``micro_batch_2X`` (a, b), ``sample_2X`` (x, y or -1). ``rank_XY``,
    ``position_XY``, ``cp_size_XY`` (0 for none), ``contents_XYF``: the micro-batches that each
    makes.
    """

    kind_X: np.ndarray
    micro_batch_2X: np.ndarray
    sample_2X: np.ndarray
    rank_XY: np.ndarray
    position_XY: np.ndarray
    cp_size_XY: np.ndarray
    contents_XYF: np.ndarray

    def made(
        self, move: int, table: MicroBatchTable, weights_S: np.ndarray
    ) -> list[tuple[int, ...]]:
        """Samples of the micro-batches that a move makes."""
        a, b = (table.members[micro_batch] for micro_batch in self.micro_batch_2X[:, move].tolist())
        x, y = self.sample_2X[:, move].tolist()
        match Kind(int(self.kind_X[move])):
            case Kind.TRADE:
                taken = (y,) if y >= 0 else ()
                return [(*_without(a, x), *taken), (*_without(b, y), x)]
            case Kind.MERGE:
                return [a + b]
            case Kind.HALVE:
                return list(_two_parts(a, weights_S))
            case _:
                return []


def _without(samples: tuple[int, ...], left_out: int) -> tuple[int, ...]:
    return tuple(sample for sample in samples if sample != left_out)


def _two_parts(
    samples: tuple[int, ...], weights_S: np.ndarray
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    by_weight = sorted(samples, key=lambda sample: (-weights_S[sample], sample))
    return tuple(by_weight[::2]), tuple(by_weight[1::2])


def draw_moves(
    table: MicroBatchTable,
    contents: Contents,
    weights_S: np.ndarray,
    rules: Rules,
    numbers: Numbers,
    count: int,
) -> Moves:
    """Draw at most ``count`` allowed moves of the table's micro-batches."""
    drawn = count * _OVERDRAWN
    kind_X = np.searchsorted(_UNTIL, numbers.below(1 << 20, drawn) / (1 << 20), side="right")
    a, b = numbers.below(len(table.cp_size_J), 2 * drawn).reshape(2, drawn)
    b = np.where(kind_X == Kind.MERGE, table.buddy_J[a], b)
    real_X = _possible(table, kind_X, a, b)
    kind_X, a, b = kind_X[real_X], a[real_X], b[real_X]
    x = table.sample_I[table.first_J[a] + numbers.below(table.size_J[a], len(a))]
    place = numbers.below(table.size_J[b] + (kind_X == Kind.TRADE), len(a))
    y = table.sample_I[table.first_J[b] + np.minimum(place, table.size_J[b] - 1)]
    y = np.where(place < table.size_J[b], y, -1)

    cp_size_J, has_JF = table.cp_size_J, table.contents_JF
    place_3XY = np.zeros((3, len(a), 2), dtype=np.int64)
    made_XYF = np.zeros((len(a), 2, has_JF.shape[1]))

    def make(
        rows: np.ndarray, y: int, micro_batch: np.ndarray, cp_size: np.ndarray, has: np.ndarray
    ) -> None:
        place_3XY[0, rows, y] = table.rank_J[micro_batch]
        place_3XY[1, rows, y] = table.position_J[micro_batch]
        place_3XY[2, rows, y] = cp_size
        made_XYF[rows, y] = has

    trade = np.flatnonzero(kind_X == Kind.TRADE)
    out_XF, in_XF = contents.of_sample_SF[x[trade]], contents.of_sample_SF[y[trade]]
    difference = out_XF - np.where((y[trade] >= 0)[:, None], in_XF, 0.0)
    make(trade, 0, a[trade], cp_size_J[a[trade]], has_JF[a[trade]] - difference)
    make(trade, 1, b[trade], cp_size_J[b[trade]], has_JF[b[trade]] + difference)

    merge = np.flatnonzero(kind_X == Kind.MERGE)
    one, other = a[merge], b[merge]
    first = np.where(table.rank_J[one] < table.rank_J[other], one, other)
    make(merge, 0, first, 2 * cp_size_J[one], has_JF[one] + has_JF[other])

    halve = np.flatnonzero(kind_X == Kind.HALVE)
    halved = a[halve]
    parts = [_two_parts(table.members[micro_batch], weights_S)[0] for micro_batch in halved]
    part_XF = np.array([contents.of(list(part)) for part in parts]).reshape(-1, has_JF.shape[1])
    half = cp_size_J[halved] // 2
    make(halve, 0, halved, half, part_XF)
    make(halve, 1, halved, half, has_JF[halved] - part_XF)
    place_3XY[0, halve, 1] += half

    chosen = np.flatnonzero(rules.allow_X(place_3XY[2], made_XYF))[:count]
    return Moves(
        kind_X=kind_X[chosen],
        micro_batch_2X=np.stack([a, b])[:, chosen],
        sample_2X=np.stack([x, y])[:, chosen],
        rank_XY=place_3XY[0, chosen],
        position_XY=place_3XY[1, chosen],
        cp_size_XY=place_3XY[2, chosen],
        contents_XYF=made_XYF[chosen],
    )


def _possible(
    table: MicroBatchTable, kind_X: np.ndarray, a: np.ndarray, b: np.ndarray
) -> np.ndarray:
    """Which kinds of moves these micro-batches can make."""
    choices = [
        table.position_J[a] != table.position_J[b],
        a != b,
        b >= 0,
        (table.cp_size_J[a] > 1) & (table.size_J[a] > 1),
    ]
    return np.choose(kind_X, choices).astype(bool)
