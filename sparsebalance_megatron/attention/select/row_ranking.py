# SPDX-License-Identifier: Apache-2.0
"""Rows of scores ranked in torch: for any device.

Shape legend: K places of a list, C heads that select, Y rows of a chunk, W columns of a chunk
(blocks that its rows may read), or places that are sorted; A anything before them, Z runs of
places, I, J strides and places within one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

_COLUMN_BITS = 32
_BELOW_ALL_SCORES = -0x7FFFFFFF
_SCRATCH_DTYPES = {
    "scaled": torch.float32,
    "mass": torch.float32,
    "ordered": torch.int32,
    "keys": torch.int64,
}


class RowRanker:
    """Lists and mass of one chunk after the other, in buffers that every chunk overwrites: fresh
    memory costs more than what is done with it. They take about 30 bytes per score.
    """

    def __init__(self, device: torch.device, *, softmax_scale: float, observe: bool) -> None:
        self._softmax_scale = softmax_scale
        self._observe = observe
        self._scratch = _Scratch(device)

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
            lists_YCK: int32, contiguous, written: the own block, then the others by falling score,
                -1 past the visible ones. Equal scores: the lower block first. NaN after all
                numbers.
            first_column: the block of column 0.

        Returns:
            float64 [places, Y], the softmax mass of the own block, then of the others, the
            greatest first, summed over heads; and bool [Y]: rows without finite mass, whose mass
            is 0 here. None where nobody observes.
        """
        block_W = torch.arange(scores_CYW.shape[2], device=own_Y.device) + first_column
        hidden_YW = (block_W < first_Y[:, None]) | (block_W > own_Y[:, None])
        own_Y1, places, seen = (own_Y - first_column)[:, None], lists_YCK.shape[2], None
        if self._observe:
            seen = _mass_by_place(scores_CYW, hidden_YW, own_Y1, self._softmax_scale, self._scratch)
        column_CYK = _best_columns_(scores_CYW, hidden_YW, own_Y1, places, self._scratch)
        absent_YK = torch.arange(places, device=own_Y.device) > (own_Y - first_Y)[:, None]
        column_CYK.add_(first_column).masked_fill_(absent_YK, -1)
        lists_YCK.copy_(column_CYK.transpose(0, 1))
        return seen


def _best_columns_(
    scores_CYW: Tensor, hidden_YW: Tensor, own_Y1: Tensor, places: int, scratch: _Scratch
) -> Tensor:
    """int64 [C, Y, places]: the own column, then the others that are not hidden by falling score.

    Equal scores: the lower column first. NaN after all numbers. What stands in places past the
    visible columns is arbitrary. Overwrites ``scores_CYW``.

    One integer per column holds the score's bits, in an order that integers keep, above the
    column's number, so that no two are equal and any algorithm finds the same order.
    """
    shape, columns = scores_CYW.shape, scores_CYW.shape[2]
    greatest = torch.finfo(scores_CYW.dtype).max
    scores_CYW.nan_to_num_(nan=-torch.inf, posinf=greatest, neginf=-greatest)
    scores_CYW.scatter_(2, own_Y1.expand(len(scores_CYW), -1, 1), torch.inf)
    bits_CYW = scores_CYW.add_(0.0).view(torch.int32)  # -0.0 equals 0.0, and so must its bits
    ordered_CYW = torch.bitwise_right_shift(bits_CYW, 31, out=scratch.take("ordered", shape))
    ordered_CYW.bitwise_and_(0x7FFFFFFF).bitwise_xor_(bits_CYW)
    ordered_CYW.masked_fill_(hidden_YW, _BELOW_ALL_SCORES)
    keys_CYW = scratch.take("keys", shape).copy_(ordered_CYW).mul_(1 << _COLUMN_BITS)
    keys_CYW -= torch.arange(columns, device=keys_CYW.device)
    best_CYK = keys_CYW.topk(min(places, columns), dim=-1).values
    column_CYK = (-best_CYK).bitwise_and_((1 << _COLUMN_BITS) - 1)
    return pad(column_CYK, (0, places - column_CYK.shape[2]))


def _mass_by_place(
    scores_CYW: Tensor, hidden_YW: Tensor, own_Y1: Tensor, softmax_scale: float, scratch: _Scratch
) -> tuple[Tensor, Tensor]:
    """Softmax mass of the own column, then of the others, the greatest first.

    Returns:
        float64 [places, Y], summed over heads, and bool [Y]: rows without finite mass, whose mass
        is 0 here.
    """
    heads, rows, columns = scores_CYW.shape
    scaled_CYW = torch.mul(
        scores_CYW, softmax_scale, out=scratch.take("scaled", scores_CYW.shape)
    ).masked_fill_(hidden_YW, -torch.inf)
    mass_CYW = torch.softmax(scaled_CYW, -1, out=scratch.take("mass", scores_CYW.shape))
    own_CY1 = own_Y1.expand(heads, -1, 1)
    own_mass_CY = mass_CYW.gather(2, own_CY1)[:, :, 0]
    # One bad number makes a whole row NaN.
    broken_Y = own_mass_CY.isnan().any(0)
    mass_CYW.scatter_(2, own_CY1, 0.0)
    places = 1 << (columns - 1).bit_length()
    falling_CWY = scratch.take("scaled", (heads, places, rows))
    falling_CWY[:, columns:] = 0.0
    no_mass = mass_CYW.new_zeros(())
    torch.where(broken_Y, no_mass, mass_CYW.transpose(1, 2), out=falling_CWY[:, :columns])
    sort_falling_(falling_CWY, scratch.take("mass", (heads * places * rows,)))
    mass_KY = falling_CWY.new_empty(places + 1, rows, dtype=torch.float64)
    torch.sum(own_mass_CY.masked_fill(broken_Y, 0.0), 0, dtype=torch.float64, out=mass_KY[0])
    torch.sum(falling_CWY, 0, dtype=torch.float64, out=mass_KY[1:])
    return mass_KY, broken_Y


class _Scratch:
    """Buffers that every chunk overwrites: fresh memory costs more than what is done with it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An uninitialised tensor; the previous one of that name is lost."""
        elements = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < elements:
            buffer = torch.empty(elements, dtype=_SCRATCH_DTYPES[name], device=self._device)
            self._buffers[name] = buffer
        return buffer[:elements].view(shape)


def sort_falling_(x_AWY: Tensor, scratch: Tensor) -> None:
    """Sort along W in place, the greatest first.

    Batcher's odd-even merge sort (Knuth, The Art of Computer Programming, section 5.3.4): all rows
    take each comparison together, in a third of the time of ``torch.sort`` on a CPU. NaN may take
    the place of other numbers of its row.

    Args:
        x_AWY: W is a power of two.
        scratch: one dimension, the same dtype; at least half as many elements, which are
            overwritten.

    Raises:
        ValueError: W is not a power of two.
    """
    places = x_AWY.shape[1]
    if places & (places - 1) or not places:
        raise ValueError(f"sort_falling_: {places} places: must be a power of two")
    run = 1
    while run < places:
        run *= 2
        x_AZWY = x_AWY.unflatten(1, (-1, run))
        stride = run // 2
        _exchange_(x_AZWY.unflatten(2, (-1, 2, stride)), scratch)
        while stride > 1:
            stride //= 2
            inner_AZWY = x_AZWY[:, :, stride : run - stride]
            _exchange_(inner_AZWY.unflatten(2, (-1, 2, stride)), scratch)


def _exchange_(x_AZI2JY: Tensor, scratch: Tensor) -> None:
    """Put the greater of every pair first."""
    first, second = x_AZI2JY.unbind(3)
    less = torch.minimum(first, second, out=scratch[: first.numel()].view(first.shape))
    torch.maximum(first, second, out=first)
    second.copy_(less)
