# SPDX-License-Identifier: Apache-2.0
"""Scores, lists and mass of a few rows at a time, in torch: for any device.

What is kept is the lists alone, and a sum per document. Beside them a chunk of rows takes about
30 bytes per score.

Shape legend: S documents of the keys' row, N blocks of the keys' row, G KV heads, D head dim,
K places of a list, Q rows that select, C heads that select, E query heads of a selecting head,
Y rows of a chunk, W columns of a chunk (blocks that its rows may read).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.precision import exact_product
from sparsebalance_megatron.attention.row_pair import RowPair
from sparsebalance_megatron.attention.selectors.chunks import chunks
from sparsebalance_megatron.attention.selectors.document_mass import DocumentMass
from sparsebalance_megatron.attention.selectors.sorting_network import sort_falling_

CHUNK_ELEMENTS = 1 << 18
"""Scores computed at once: 1 MiB in float32, about a core's second-level cache."""
_LARGER_ON_CUDA = 2
_COLUMN_BITS = 32
_BELOW_ALL_SCORES = -0x7FFFFFFF
_SCRATCH_DTYPES = {
    "scaled": torch.float32,
    "mass": torch.float32,
    "ordered": torch.int32,
    "keys": torch.int64,
}


def rank_in_chunks(
    askers_QCED: Tensor,
    keys_NGD: Tensor,
    rows: RowPair,
    *,
    by_token: bool,
    softmax_scale: float,
    places: int,
    observe: bool,
) -> tuple[Tensor, Tensor | None]:
    """indices_QCK of ``places`` places and mass_SK of :class:`..ranking.Ranking`.

    Args:
        askers_QCED: a row asks with the mean over E.
        keys_NGD: mean keys of the blocks of the keys' row; C is a multiple of G.
        by_token: whether rows are tokens, or blocks that speak for their tokens.
    """
    heads, kv_layout = askers_QCED.shape[1], rows.kv_layout
    own_Q = rows.row_block(by_token=by_token)
    indices_QCK = own_Q.new_empty(own_Q.shape[0], heads, places, dtype=torch.int32)
    mass = DocumentMass(rows, by_token=by_token) if observe else None
    scratch = _Scratch(keys_NGD.device)
    for chunk in chunks(
        rows, by_token=by_token, heads=heads, elements=_chunk_elements(keys_NGD.device)
    ):
        own_Y = own_Q[chunk.rows]
        first_Y = kv_layout.first_block_S[kv_layout.document_N[own_Y]]
        scores_CYW = _scores(askers_QCED[chunk.rows], keys_NGD[chunk.blocks])
        column_W = torch.arange(chunk.blocks.start, chunk.blocks.stop, device=own_Y.device)
        hidden_YW = (column_W < first_Y[:, None]) | (column_W > own_Y[:, None])
        own_Y1 = (own_Y - chunk.blocks.start)[:, None]
        if mass is not None:
            seen = _mass_by_place(scores_CYW, hidden_YW, own_Y1, softmax_scale, scratch)
            mass.add(chunk.rows, chunk.documents, *seen)
        column_CYK = _best_columns_(scores_CYW, hidden_YW, own_Y1, places, scratch)
        list_CYK = column_CYK + chunk.blocks.start
        absent_YK = torch.arange(places, device=own_Y.device) > (own_Y - first_Y)[:, None]
        list_CYK.masked_fill_(absent_YK, -1)
        indices_QCK[chunk.rows] = list_CYK.transpose(0, 1)
    return indices_QCK, None if mass is None else mass.of_documents()


def _chunk_elements(device: torch.device) -> int:
    return CHUNK_ELEMENTS * (_LARGER_ON_CUDA if device.type == "cuda" else 1)


def _scores(askers_YCED: Tensor, keys_WGD: Tensor) -> Tensor:
    """float32 [C, Y, W], before the softmax scale."""
    queries_CYD = askers_YCED.float().mean(2).transpose(0, 1)
    per_key = queries_CYD.shape[0] // keys_WGD.shape[1]
    keys_CWD = keys_WGD.float().transpose(0, 1).repeat_interleave(per_key, dim=0)
    return exact_product(queries_CYD, keys_CWD.transpose(1, 2))


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
