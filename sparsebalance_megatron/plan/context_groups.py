# SPDX-License-Identifier: Apache-2.0
"""Slots that several ranks share: neighbours, as many as a power of two, at one position.

A slot of width w begins at a multiple of w, so the width of the slot that every rank takes part in
says which ranks share it.

Shape legend: R data-parallel ranks, M micro-batches, J = R x M places, X ranks.
"""

from __future__ import annotations

import numpy as np


def first_places(widths_RM: np.ndarray) -> np.ndarray:
    """The place ``r * M + m`` on a slot's first rank, for every place in the slot, [J]."""
    ranks, positions = widths_RM.shape
    rank_R1 = np.arange(ranks)[:, None]
    first_RM = rank_R1 - rank_R1 % widths_RM
    return np.asarray(first_RM * positions + np.arange(positions)).reshape(-1)


def widest_slot(ranks: int, ranks_per_node: int) -> int:
    """The largest power of two, up to 8, of neighbours that share a node wherever they begin."""
    width = 8
    while ranks % width or ranks_per_node % width:
        width //= 2
    return width


class Members:
    """Who shares with whom, for arrays whose last axis is ranks.

    Args:
        widths_X: of the slot that each rank takes part in, [..., X].
    """

    def __init__(self, widths_X: np.ndarray) -> None:
        widest = int(widths_X.max(initial=1))
        sizes = [1 << level for level in range(widest.bit_length() - 1)]
        self._wider = [
            (size, _pairs(widths_X, size)[..., 0, :] > size) for size in sizes if size < widest
        ]

    def maximum(self, values_X: np.ndarray, rows: slice | np.ndarray = slice(None)) -> None:
        """In place, the largest value among the members of a slot, for each of them.

        Args:
            values_X: [..., X], contiguous.
            rows: of the first axis of the widths, those that ``values_X`` is for.
        """
        for size, wider in self._wider:
            pairs = _pairs(values_X, size)
            largest = np.maximum(pairs[..., 0, :], pairs[..., 1, :])
            chosen = wider[rows]
            np.copyto(pairs[..., 0, :], largest, where=chosen)
            np.copyto(pairs[..., 1, :], largest, where=chosen)


def _pairs(values_X: np.ndarray, size: int) -> np.ndarray:
    return values_X.reshape(*values_X.shape[:-1], -1, 2, size)
