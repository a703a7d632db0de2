# SPDX-License-Identifier: Apache-2.0
"""Rows of scores ranked in torch: for any device.

Shape legend: K places of a list, C heads that select, Y rows of a chunk, W columns of a chunk
(blocks that its rows may read), I first blocks of a document.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

_COLUMN_BITS = 32
_BELOW_ALL_SCORES = -0x7FFFFFFF
_ABOVE_ALL_SCORES = 0x7FFFFFFF
"""Above infinity, which stands for the score of a document's first blocks."""
_ABOVE_ALL_MASS = 2.0


class RowRanker:
    """Lists and mass of one chunk after the other."""

    def __init__(self, *, softmax_scale: float, observe: bool, first_blocks: int) -> None:
        self._softmax_scale = softmax_scale
        self._observe = observe
        self._first_blocks = first_blocks

    def rank_(
        self,
        scores_CYW: Tensor,
        own_Y: Tensor,
        first_Y: Tensor,
        lists_YCK: Tensor,
        *,
        first_column: int,
    ) -> tuple[Tensor, Tensor] | None:
        """Rank the blocks from each row's first to its own.

        Args:
            scores_CYW: float32, before the softmax scale; overwritten.
            own_Y, first_Y: int64 numbers of blocks.
            lists_YCK: int32, contiguous, written: the own block, the document's first blocks, then
                the others by falling score, -1 past the visible ones. Equal scores: the lower block
                first. NaN after all numbers.
            first_column: the block of column 0.

        Returns:
            float64 [places, Y], the softmax mass of the own block, of the first blocks, then of
            the others, the greatest first, summed over heads; and bool [Y]: rows without finite
            mass, whose mass is 0 here. None where coverage is not observed.
        """
        block_W = torch.arange(scores_CYW.shape[2], device=own_Y.device) + first_column
        hidden_YW = (block_W < first_Y[:, None]) | (block_W > own_Y[:, None])
        own_Y1 = (own_Y - first_column)[:, None]
        own_CY1 = own_Y1.expand(len(scores_CYW), -1, 1)
        # A first block that a row does not see before its own one gives way to that.
        place_I = torch.arange(min(self._first_blocks, len(block_W) - 1), device=own_Y.device)
        first_YI = torch.minimum((first_Y - first_column)[:, None] + place_I, own_Y1)
        first_CYI = first_YI.expand(len(scores_CYW), -1, -1)
        seen, places = None, lists_YCK.shape[2]
        if self._observe:
            seen = _mass_by_place(scores_CYW * self._softmax_scale, hidden_YW, own_CY1, first_CYI)
        column_CYK = _best_columns_(scores_CYW, hidden_YW, own_CY1, first_CYI, places)
        absent_YK = torch.arange(places, device=own_Y.device) > (own_Y - first_Y)[:, None]
        column_CYK.add_(first_column).masked_fill_(absent_YK, -1)
        lists_YCK.copy_(column_CYK.transpose(0, 1))
        return seen


def _best_columns_(
    scores_CYW: Tensor, hidden_YW: Tensor, own_CY1: Tensor, first_CYI: Tensor, places: int
) -> Tensor:
    """int64 [C, Y, places]: the own column, the first ones, then the others that are not hidden by
    falling score.

    Equal scores: the lower column first. NaN after all numbers. What stands in places past the
    visible columns is arbitrary. Overwrites ``scores_CYW``.

    One integer per column holds the score's bits, in an order that integers keep, above the
    column's number, so that no two are equal and any algorithm finds the same order.
    """
    columns, greatest = scores_CYW.shape[2], torch.finfo(scores_CYW.dtype).max
    scores_CYW.nan_to_num_(nan=-torch.inf, posinf=greatest, neginf=-greatest)
    scores_CYW.scatter_(2, first_CYI, torch.inf)
    bits_CYW = scores_CYW.add_(0.0).view(torch.int32)  # -0.0 equals 0.0, and so must its bits
    ordered_CYW = (bits_CYW >> 31).bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits_CYW)
    ordered_CYW.scatter_(2, own_CY1, _ABOVE_ALL_SCORES)
    keys_CYW = ordered_CYW.masked_fill_(hidden_YW, _BELOW_ALL_SCORES).long().mul_(1 << _COLUMN_BITS)
    keys_CYW -= torch.arange(columns, device=keys_CYW.device)
    best_CYK = keys_CYW.topk(min(places, columns), dim=-1).values
    column_CYK = best_CYK.neg_().bitwise_and_((1 << _COLUMN_BITS) - 1)
    return pad(column_CYK, (0, places - column_CYK.shape[2]))


def _mass_by_place(
    scaled_CYW: Tensor, hidden_YW: Tensor, own_CY1: Tensor, first_CYI: Tensor
) -> tuple[Tensor, Tensor]:
    """Softmax mass of the own column, of the first ones, then of the others, the greatest first.

    Returns:
        float64 [W, Y], summed over heads, and bool [Y]: rows without finite mass, whose mass is 0
        here.
    """
    mass_CYW = scaled_CYW.masked_fill_(hidden_YW, -torch.inf).softmax(-1)
    own_mass_CY1 = mass_CYW.gather(2, own_CY1)
    firsts = first_CYI.shape[2]
    first_mass_CYI = mass_CYW.gather(2, first_CYI).masked_fill_(first_CYI == own_CY1, 0.0)
    mass_CYW.scatter_(2, first_CYI, _ABOVE_ALL_MASS)
    mass_CYW.scatter_(2, own_CY1, torch.inf)
    rising_CYW = _sorted(mass_CYW)
    rising_CYW[..., -1:] = own_mass_CY1
    rising_CYW[..., -1 - firsts : -1] = first_mass_CYI.flip(-1)
    # One bad number makes a whole row NaN.
    broken_Y = own_mass_CY1.isnan().any(0)[:, 0]
    mass_YW = rising_CYW.sum(0, dtype=torch.float64).flip(-1)
    return mass_YW.masked_fill_(broken_Y[:, None], 0.0).t(), broken_Y


def _sorted(x: Tensor) -> Tensor:
    """Rows, rising; ``x`` may be overwritten."""
    if x.device.type != "cpu":
        return x.sort(-1).values
    x.numpy().sort(axis=-1)  # an eighth of the time of torch.sort
    return x
