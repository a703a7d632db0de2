# SPDX-License-Identifier: Apache-2.0
"""Packs samples into rows of equal height, for ranks that wait for one another in every layer.

A row is the micro-batches of a lockstep group at one position, one bin for each member. It takes as
long as its fullest bin, its height. The sum of heights is what all rows take, one after another.

1. *Open.* The heaviest samples, one for each bin, open the bins in falling order: so neighbours in
   weight share a row, and no bin is empty. One sample a bin is then the least sum of heights.
2. *Add.* Each later sample, heaviest first, goes where its row grows least; of equals, where it
   leaves least room below the height, or, evenly, most. No bin exceeds the cap of tokens.
3. *Move.* A sample of a row's fullest bin moves to another bin, or changes places with a sample
   there, where that lowers the sum of heights most. Rows that no move of a round has touched move
   at once. This ends where no move helps, or after ``_MAX_ROUNDS``.

Shape legend: X rows, W bins of a row, J = X x W bins, A samples that may move, Y places where they
may go: samples, then bins.
"""

from __future__ import annotations

import numpy as np

_MAX_ROUNDS = 64
"""Rounds of moves."""
_GAIN = 1e-9
"""Share of the mean height that a move must save."""


def packed_rows(
    weights_S: np.ndarray,
    tokens_S: np.ndarray,
    rows: int,
    members: int,
    cap_tokens: int,
    *,
    evenly: bool = False,
) -> Rows | None:
    """Rows of few and equal heights; None where the samples do not fit so many bins.

    Args:
        weights_S: predicted ms of every sample.
        cap_tokens: of a bin.

    >>> rows = packed_rows(np.array([9.0, 4.0, 4.0, 1.0]), np.ones(4, int), 2, 2, 4)
    >>> rows.samples, rows.heights_X.tolist()
    ([((0,), (1,)), ((2,), (3,))], [9.0, 4.0])
    """
    if len(weights_S) < rows * members:
        return None
    packing = Rows(np.asarray(weights_S, dtype=np.float64), tokens_S, rows, members, cap_tokens)
    return packing if packing.fill(evenly=evenly) else None


class Rows:
    """Samples in bins.

    Attributes:
        bin_S: ``row * W + member`` of every sample, -1 before it has one.
        load_J: weight of every bin.
        used_J: tokens of every bin.
    """

    def __init__(
        self,
        weights_S: np.ndarray,
        tokens_S: np.ndarray,
        rows: int,
        members: int,
        cap_tokens: int,
    ) -> None:
        self._weights_S, self._tokens_S, self._cap_tokens = weights_S, tokens_S, cap_tokens
        self._members = members
        self.bin_S = np.full(len(weights_S), -1)
        self.load_J = np.zeros(rows * members)
        self.used_J = np.zeros(rows * members, dtype=np.int64)

    @property
    def heights_X(self) -> np.ndarray:
        return np.asarray(self.load_J.reshape(-1, self._members).max(axis=1))

    @property
    def samples(self) -> list[tuple[tuple[int, ...], ...]]:
        """The samples of every bin of every row."""
        order = np.argsort(self.bin_S, kind="stable")
        edges = np.searchsorted(self.bin_S[order], np.arange(1, len(self.load_J)))
        bins = [tuple(part.tolist()) for part in np.split(order, edges)]
        width = self._members
        return [tuple(bins[first : first + width]) for first in range(0, len(bins), width)]

    def fill(self, *, evenly: bool) -> bool:
        """Open all bins and add the other samples; whether all found room."""
        order = np.argsort(-self._weights_S, kind="stable")
        first = order[: len(self.load_J)]
        self.bin_S[first] = np.arange(len(first))
        self.load_J[:], self.used_J[:] = self._weights_S[first], self._tokens_S[first]
        if self.used_J.max() > self._cap_tokens:
            return False
        for sample in order[len(first) :].tolist():
            weight, tokens = self._weights_S[sample], self._tokens_S[sample]
            height_J = np.repeat(self.heights_X, self._members)
            over_J = self.load_J + weight - height_J
            grows_J = np.where(
                self.used_J + tokens > self._cap_tokens, np.inf, np.maximum(over_J, 0.0)
            )
            least = grows_J.min()
            if not np.isfinite(least):
                return False
            room_J = -over_J if evenly else over_J
            chosen = int(np.where(grows_J <= least, room_J, -np.inf).argmax())
            self.bin_S[sample] = chosen
            self.load_J[chosen] += weight
            self.used_J[chosen] += tokens
        return True

    def improve(self) -> None:
        """Move samples while that lowers the sum of heights."""
        for _ in range(_MAX_ROUNDS):
            if not self._round():
                return

    def _round(self) -> bool:
        """Make the best moves of different rows; whether there was one."""
        width, load_J = self._members, self.load_J
        row_J = np.arange(len(load_J)) // width
        height_J = np.repeat(self.heights_X, width)
        # The fullest, second and third fullest load of each row, to know a height without two bins.
        top_J3 = np.repeat(self._fullest_X3(), width, axis=0)
        without_J = np.where(load_J >= top_J3[:, 0], top_J3[:, 1], top_J3[:, 0])
        size_J = np.bincount(self.bin_S, minlength=len(load_J))
        give_A = np.flatnonzero(load_J[self.bin_S] >= height_J[self.bin_S])
        from_A1 = self.bin_S[give_A][:, None]
        # Every sample may come back, or nothing from any bin.
        to_Y = np.concatenate([self.bin_S, np.arange(len(load_J))])
        weight_Y = np.concatenate([self._weights_S, np.zeros(len(load_J))])
        tokens_Y = np.concatenate([self._tokens_S, np.zeros(len(load_J), dtype=np.int64)])
        nothing_Y = np.arange(len(to_Y)) >= len(self.bin_S)
        shift_AY = self._weights_S[give_A][:, None] - weight_Y
        tokens_AY = self._tokens_S[give_A][:, None] - tokens_Y
        own_AY, other_AY = load_J[from_A1] - shift_AY, load_J[to_Y] + shift_AY
        apart_AY = np.maximum(without_J[from_A1], own_AY) + np.maximum(without_J[to_Y], other_AY)
        apart_AY -= height_J[from_A1] + height_J[to_Y]
        # Within a row the rest are the bins but the fullest and the one that it gives to.
        rest_Y = np.where(load_J >= top_J3[:, 1], top_J3[:, 2], top_J3[:, 1])[to_Y]
        within_AY = np.maximum(np.maximum(own_AY, other_AY), rest_Y) - height_J[from_A1]
        saved_AY = -np.where(row_J[from_A1] == row_J[to_Y], within_AY, apart_AY)
        fits_AY = (
            (shift_AY > 0.0)
            & (from_A1 != to_Y)
            & (self.used_J[to_Y] + tokens_AY <= self._cap_tokens)
            & (self.used_J[from_A1] - tokens_AY <= self._cap_tokens)
            & ((size_J[from_A1] > 1) | ~nothing_Y)
        )
        saved_AY = np.where(fits_AY, saved_AY, 0.0)
        best_A = saved_AY.argmax(axis=1)
        touched_X = np.zeros(len(load_J) // width, dtype=bool)
        moved = False
        for a in np.argsort(-saved_AY[np.arange(len(give_A)), best_A], kind="stable").tolist():
            y = int(best_A[a])
            if saved_AY[a, y] <= _GAIN * height_J.mean():
                break
            own, other = int(from_A1[a, 0]), int(to_Y[y])
            if touched_X[[own // width, other // width]].any():
                continue
            touched_X[[own // width, other // width]] = moved = True
            self.bin_S[give_A[a]] = other
            if not nothing_Y[y]:
                self.bin_S[y] = own
            self.load_J[own] -= shift_AY[a, y]
            self.load_J[other] += shift_AY[a, y]
            self.used_J[own] -= tokens_AY[a, y]
            self.used_J[other] += tokens_AY[a, y]
        return moved

    def _fullest_X3(self) -> np.ndarray:
        """The three greatest loads of every row, 0 for bins that it does not have."""
        load_XW = self.load_J.reshape(-1, self._members)
        padded_XW = np.pad(load_XW, ((0, 0), (0, max(0, 3 - self._members))))
        return np.asarray(-np.sort(-padded_XW, axis=1)[:, :3])
