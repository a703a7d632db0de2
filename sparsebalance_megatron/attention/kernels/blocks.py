# SPDX-License-Identifier: Apache-2.0
"""Attention of query blocks over gathered KV blocks: time and memory follow the budget.

A tile is one query block of one KV head, with the group's query heads stacked as its rows; the
units of its list, past blocks or single columns, are gathered for it side by side. On the CPU tiles
with lists of one length are computed together. Elsewhere lists are padded, and padding is a unit of
zeros of its own: a mask that adds -inf would not hold back the NaN of another document.

Shape legend: T tokens of the packed row (of queries or of keys), H query heads, G KV heads, D head
dim, N blocks of the queries' row, K places of a list, B tokens of a query block, E of a unit, U
units of the keys' row, A tiles (query blocks of all KV heads; of keys units of all heads), I rows
of a tile (B * H / G), W columns of a tile (list length * E).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.kernels import assembled
from sparsebalance_megatron.attention.kernels.assembled import own_listed_QC
from sparsebalance_megatron.attention.kernels.contract import Saved, obstacle_of_lists
from sparsebalance_megatron.attention.kernels.tile_attention import (
    attend,
    attend_backward,
    host_may_read,
    tiles_at_once,
)
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.merge import merge_partials
from sparsebalance_megatron.attention.selection import Selection


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection by query block; see :class:`..kernel.Kernel`.

    Computes in float32, or float64 for float64 inputs. Deterministic on the CPU; on CUDA where
    ``torch.use_deterministic_algorithms`` makes ``index_add_`` so.
    """
    return assembled.forward(_PastBlocks, q_THD, k_TGD, v_TGD, selection, softmax_scale)


def backward(dout_THD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, as deterministic as :func:`forward`; see :class:`..kernel.Kernel`."""
    return assembled.backward(_PastBlocks, dout_THD, saved)


def obstacle(q_THD: Tensor, selection: Selection) -> str | None:
    """Refuse selections by token."""
    return obstacle_of_lists(selection, by_token=False)


class _PastBlocks:
    """The past blocks of one call, and its columns."""

    def __init__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        softmax_scale: float,
    ) -> None:
        own_NG, columns = own_listed_QC(selection), selection.columns
        # The own block comes first, and is not gathered.
        shifted_NGK = pad(selection.indices_QCK[..., 1:], (0, 1), value=-1)

        def gathered(lists_NGK: Tensor, counts_NG: Tensor, units: PackedLayout | None) -> _Gathered:
            lists = lists_NGK, counts_NG, selection.query_layout, units
            return _Gathered(q_THD, k_TGD, v_TGD, *lists, softmax_scale)

        self._parts = [
            gathered(
                torch.where(own_NG[..., None], shifted_NGK, selection.indices_QCK),
                selection.counts_QC - own_NG.to(selection.counts_QC.dtype),
                selection.kv_layout,
            )
        ]
        if columns is not None and columns.tokens_NGK.shape[2]:
            self._parts.append(gathered(columns.tokens_NGK, columns.counts_NG, None))

    def forward(self, out_THD: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        for part in self._parts:
            out_THD, lse_TH = part.forward(out_THD, lse_TH)
        return out_THD, lse_TH

    def backward(
        self,
        dout_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        dq_THD: Tensor,
        dk_TGD: Tensor,
        dv_TGD: Tensor,
    ) -> None:
        for part in self._parts:
            part.backward(dout_THD, out_THD, lse_TH, dq_THD, dk_TGD, dv_TGD)


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Tiles computed together, and their units as positions in [G * U].

    ``mask_A1W`` is -inf where lists are padded; None where all are full.
    """

    tiles_A: Tensor
    units_AK: Tensor
    mask_A1W: Tensor | None


class _Gathered:
    """One list of units per query block and KV head, none of which needs a causal mask.

    Args:
        q_THD, k_TGD, v_TGD: of the dtype computed in.
        lists_NGK: numbers of units, undefined past the end of a list.
        counts_NG: lengths of the lists.
        query_layout: the blocks of the queries' row.
        units: the blocks that the lists name; None where they name single tokens.
        softmax_scale: factor on q . k.
    """

    def __init__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        lists_NGK: Tensor,
        counts_NG: Tensor,
        query_layout: PackedLayout,
        units: PackedLayout | None,
        softmax_scale: float,
    ) -> None:
        self._query_layout, self._units = query_layout, units
        self._softmax_scale = softmax_scale
        self._count = units.blocks if units else k_TGD.shape[0]
        self._unit_tokens = units.block_tokens if units else 1
        self._kv_heads = k_TGD.shape[1]
        self._group = q_THD.shape[1] // self._kv_heads
        self._by_length = host_may_read(q_THD.device)
        self._q_AID = self._query_tiles(q_THD)
        self._k_AED, self._v_AED = self._key_units(k_TGD), self._key_units(v_TGD)
        self._lists_AK = lists_NGK.transpose(0, 1).flatten(0, 1).long()
        self._counts_A = counts_NG.transpose(0, 1).flatten(0, 1)

    def forward(self, out_THD: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Merge what the units give into an output and its LSE."""
        out_AID = torch.zeros_like(self._q_AID)
        lse_AI = out_AID.new_full(out_AID.shape[:2], -torch.inf)
        for chunk in self._chunks():
            tiles_A = chunk.tiles_A
            o_AID, l_AI = attend(
                self._q_AID.index_select(0, tiles_A),
                _gather(self._k_AED, chunk.units_AK),
                _gather(self._v_AED, chunk.units_AK),
                softmax_scale=self._softmax_scale,
                mask_AIW=chunk.mask_A1W,
            )
            out_AID.index_copy_(0, tiles_A, o_AID)
            lse_AI.index_copy_(0, tiles_A, l_AI)
        return merge_partials(out_THD, lse_TH, self._query_rows(out_AID), self._query_rows(lse_AI))

    def backward(
        self,
        dout_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        dq_THD: Tensor,
        dk_TGD: Tensor,
        dv_TGD: Tensor,
    ) -> None:
        """Add gradients to dq, dk and dv; LSE +inf: a query that takes no part."""
        dout_AID, out_AID, lse_AI = map(self._query_tiles, (dout_THD, out_THD, lse_TH))
        dq_AID = torch.zeros_like(self._q_AID)
        dk_AED, dv_AED = torch.zeros_like(self._k_AED), torch.zeros_like(self._v_AED)
        for chunk in self._chunks():
            tiles_A, units_AK = chunk.tiles_A, chunk.units_AK
            part_AID, dk_AWD, dv_AWD = attend_backward(
                dout_AID.index_select(0, tiles_A),
                self._q_AID.index_select(0, tiles_A),
                _gather(self._k_AED, units_AK),
                _gather(self._v_AED, units_AK),
                out_AID.index_select(0, tiles_A),
                lse_AI.index_select(0, tiles_A),
                softmax_scale=self._softmax_scale,
                mask_AIW=chunk.mask_A1W,
            )
            dq_AID.index_copy_(0, tiles_A, part_AID)
            for whole_AED, part_AWD in ((dk_AED, dk_AWD), (dv_AED, dv_AWD)):
                whole_AED.index_add_(
                    0, units_AK.flatten(), part_AWD.reshape(-1, *whole_AED.shape[1:])
                )
        dq_THD += self._query_rows(dq_AID)
        dk_TGD += self._key_rows(dk_AED)
        dv_TGD += self._key_rows(dv_AED)

    def _query_tiles(self, x_TH: Tensor) -> Tensor:
        """[T, H, ...] to [A, I, ...], zeros past short blocks."""
        x = self._query_layout.to_blocks(x_TH).unflatten(2, (self._kv_heads, self._group))
        return x.movedim(2, 0).flatten(2, 3).flatten(0, 1).contiguous()

    def _query_rows(self, x_AI: Tensor) -> Tensor:
        """[A, I, ...] to [T, H, ...]."""
        x = x_AI.unflatten(0, (self._kv_heads, -1)).unflatten(2, (-1, self._group))
        return self._query_layout.from_blocks(x.movedim(0, 2).flatten(2, 3))

    def _key_units(self, x_TGD: Tensor) -> Tensor:
        """[T, G, D] to [A, E, D], zeros past short units; the padding comes last, if there is."""
        x_UEGD = self._units.to_blocks(x_TGD) if self._units else x_TGD.unsqueeze(1)
        x = x_UEGD.movedim(2, 0).flatten(0, 1).contiguous()
        return x if self._by_length else pad(x, (0, 0, 0, 0, 0, 1))

    def _key_rows(self, x_AED: Tensor) -> Tensor:
        """[A, E, D] to [T, G, D]."""
        x_AED = x_AED if self._by_length else x_AED[:-1]
        x_UEGD = x_AED.unflatten(0, (self._kv_heads, -1)).movedim(0, 2)
        return self._units.from_blocks(x_UEGD) if self._units else x_UEGD.squeeze(1)

    def _chunks(self) -> Iterator[_Chunk]:
        """Cut all tiles into chunks.

        On the CPU the lists are sorted by length. Elsewhere the lengths stay unread, since reading
        them would stop the host: all lists are computed at full width, and what lies past their
        end is masked.
        """
        tiles, units = self._lists_AK.shape[0], self._count
        first_A1 = (
            torch.arange(tiles, device=self._lists_AK.device)
            .div_(tiles // self._kv_heads, rounding_mode="floor")
            .mul_(units)[:, None]
        )
        lists_AK = self._lists_AK + first_A1
        if self._by_length:
            yield from self._chunks_by_length(lists_AK)
        else:
            yield from self._chunks_at_full_width(lists_AK)

    def _chunks_by_length(self, lists_AK: Tensor) -> Iterator[_Chunk]:
        counts_A, by_length_A = self._counts_A.sort(stable=True)
        lengths, sizes = counts_A.unique_consecutive(return_counts=True)
        for length, tiles in zip(lengths.tolist(), by_length_A.split(sizes.tolist()), strict=True):
            if length == 0:
                continue
            for tiles_A in tiles.split(self._tiles_at_once(length)):
                yield _Chunk(tiles_A=tiles_A, units_AK=lists_AK[tiles_A, :length], mask_A1W=None)

    def _chunks_at_full_width(self, lists_AK: Tensor) -> Iterator[_Chunk]:
        tiles, width = lists_AK.shape
        device = lists_AK.device
        past_end_AK = torch.arange(width, device=device) >= self._counts_A[:, None]
        lists_AK = lists_AK.masked_fill(past_end_AK, self._kv_heads * self._count)
        mask_AK = torch.zeros_like(lists_AK, dtype=self._q_AID.dtype)
        mask_AK.masked_fill_(past_end_AK, -torch.inf)
        size = self._unit_tokens
        for tiles_A in torch.arange(tiles, device=device).split(self._tiles_at_once(width)):
            yield _Chunk(
                tiles_A=tiles_A,
                units_AK=lists_AK[tiles_A],
                mask_A1W=mask_AK[tiles_A].repeat_interleave(size, 1)[:, None],
            )

    def _tiles_at_once(self, length: int) -> int:
        keys = length * self._unit_tokens
        return tiles_at_once(self._q_AID.shape[1], keys, self._q_AID.device)


def _gather(x_AED: Tensor, units_AK: Tensor) -> Tensor:
    """The listed units side by side: [A, W, D]."""
    return x_AED.index_select(0, units_AK.flatten()).view(len(units_AK), -1, x_AED.shape[2])
