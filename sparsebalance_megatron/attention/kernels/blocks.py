# SPDX-License-Identifier: Apache-2.0
"""Attention over the blocks and columns of lists, on any device.

Two parts make it up: every query's own block, and past blocks. How past blocks are gathered is what
implementations differ in: here by query block, in :mod:`.tokens` by token. Time and memory follow
the length of the lists.

A tile is one query block of one KV head, with the group's query heads stacked as its rows; the
units of its list, blocks or single tokens, are gathered for it side by side. Tiles with lists of
one length are computed together: on CUDA the host waits to read the lengths.

Shape legend: T tokens of the packed sequence (of queries or of keys), N blocks of the queries, B
tokens of a query block, E of a unit, U units of the keys, A tiles (query blocks of all KV heads; of
keys units of all heads), I rows of a tile (B * H / G), W columns of a tile (list length * E).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.kernels.contract import (
    Inputs,
    Saved,
    merge_partials,
    wide_dtype,
)
from sparsebalance_megatron.attention.kernels.tile_attention import (
    attend,
    attend_backward,
    tiles_at_once,
)
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection


class Part(Protocol):
    """Some entries of a selection's lists. Tensors are of the dtype computed in."""

    def forward(self, out_THF: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        """Merge what these entries give into the output and LSE of others."""

    def backward(
        self, dout_THF: Tensor, out_THF: Tensor, lse_TH: Tensor, gradients: Sequence[Tensor]
    ) -> None:
        """Add to dq_THD, dk_TGD and dv_TGF, from the output and LSE of all entries; a query whose
        LSE is +inf takes no part."""


@dataclass(frozen=True, kw_only=True)
class AssembledKernel:
    """A :class:`.contract.Kernel` of selections by token, or of those by query block.

    Computes in float32, or float64 for float64 inputs. Deterministic on the CPU; on CUDA where
    ``torch.use_deterministic_algorithms`` makes ``index_add_`` so. ``past_blocks`` gives the parts
    that read past blocks.
    """

    past_blocks: Callable[[Inputs], Sequence[Part]]
    by_token: bool

    def forward(self, given: Inputs) -> tuple[Tensor, Tensor]:
        wide = _widened(given)
        out, lse = own_blocks(wide).attend()
        for part in self.past_blocks(wide):
            out, lse = part.forward(out, lse)
        return out.to(given.q_THD.dtype), lse

    def backward(self, dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        wide = _widened(saved)
        dout, out = (x.to(wide.q_THD.dtype) for x in (dout_THF, saved.out_THF))
        # A query that reads nothing has LSE -inf: with +inf its probabilities are 0.
        lse = saved.lse_TH.masked_fill(saved.lse_TH == -torch.inf, torch.inf)
        gradients = own_blocks(wide).gradients(dout, out, lse)
        for part in self.past_blocks(wide):
            part.backward(dout, out, lse, gradients)
        dq, dk, dv = (x.to(saved.q_THD.dtype) for x in gradients)
        return dq, dk, dv

    def obstacle(self, q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
        if selection.by_token and not self.by_token:
            return 'serves selections by query block, not by token: use "tokens" or "auto"'
        if self.by_token and not selection.by_token:
            return 'serves selections by token, not by query block: use "auto"'
        return None


def _widened(given: Inputs) -> Inputs:
    q_THD, k_TGD, v_TGF = (x.to(wide_dtype(x.dtype)) for x in given.qkv)
    return replace(given, q_THD=q_THD, k_TGD=k_TGD, v_TGF=v_TGF)


def _past_blocks(given: Inputs) -> "list[GatheredLists]":
    """Past blocks, and columns where there are any."""
    columns, (_, lists_NGK, counts_NG) = (
        given.selection.columns,
        without_own_blocks(given.selection),
    )
    parts = [GatheredLists(given, lists_NGK, counts_NG, given.selection.kv_layout)]
    if columns is not None and columns.tokens_NGK.shape[2]:
        parts.append(GatheredLists(given, columns.tokens_NGK, columns.counts_NG, None))
    return parts


class GatheredLists:
    """One list of units for each query block and KV head.

    Args:
        lists_NGK, counts_NG: numbers of units, undefined past the end of a list, and how many.
        units: the blocks that the lists name; None where they name single tokens.
        own_block: whether the only unit of a list is the query block itself, which is read up to
            the query.
        absent_TH: queries that do not read what their block's list names; None for none.
    """

    def __init__(
        self,
        given: Inputs,
        lists_NGK: Tensor,
        counts_NG: Tensor,
        units: PackedLayout | None,
        *,
        own_block: bool = False,
        absent_TH: Tensor | None = None,
    ) -> None:
        q_THD, k_TGD, v_TGF = given.qkv
        self._query_layout, self._units = given.selection.query_layout, units
        self._softmax_scale, self._absent_TH = given.softmax_scale, absent_TH
        self._count = units.blocks if units else k_TGD.shape[0]
        self._unit_tokens = units.block_tokens if units else 1
        self._kv_heads = k_TGD.shape[1]
        self._group = q_THD.shape[1] // self._kv_heads
        self._q_AID = self._query_tiles(q_THD)
        self._k_AED, self._v_AEF = self._key_units(k_TGD), self._key_units(v_TGF)
        self._lists_AK = lists_NGK.transpose(0, 1).flatten(0, 1).long()
        self._counts_A = counts_NG.transpose(0, 1).flatten(0, 1)
        self._later_keys_1IW: Tensor | None = None
        if own_block:
            shape = self._query_layout.block_tokens, self._unit_tokens
            later_BE = q_THD.new_full(shape, -torch.inf).triu_(1)
            self._later_keys_1IW = later_BE.repeat_interleave(self._group, 0)[None]

    def attend(self) -> tuple[Tensor, Tensor]:
        """out_THF and lse_TH; 0 and -inf where a query reads nothing."""
        out_AIF = self._q_AID.new_zeros(*self._q_AID.shape[:2], self._v_AEF.shape[2])
        lse_AI = out_AIF.new_full(out_AIF.shape[:2], -torch.inf)
        for tiles_A, units_AK in self._chunks():
            o_AIF, l_AI = attend(
                self._q_AID.index_select(0, tiles_A),
                gathered(self._k_AED, units_AK),
                gathered(self._v_AEF, units_AK),
                softmax_scale=self._softmax_scale,
                mask_AIW=self._later_keys_1IW,
            )
            out_AIF.index_copy_(0, tiles_A, o_AIF)
            lse_AI.index_copy_(0, tiles_A, l_AI)
        out_THF, lse_TH = self._query_rows(out_AIF), self._query_rows(lse_AI)
        if self._absent_TH is not None:
            out_THF = out_THF.masked_fill(self._absent_TH[..., None], 0.0)
            lse_TH = lse_TH.masked_fill(self._absent_TH, -torch.inf)
        return out_THF, lse_TH

    def forward(self, out_THF: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        return merge_partials(out_THF, lse_TH, *self.attend())

    def backward(
        self, dout_THF: Tensor, out_THF: Tensor, lse_TH: Tensor, gradients: Sequence[Tensor]
    ) -> None:
        for whole, part in zip(gradients, self.gradients(dout_THF, out_THF, lse_TH), strict=True):
            whole += part

    def gradients(
        self, dout_THF: Tensor, out_THF: Tensor, lse_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq_THD, dk_TGD and dv_TGF of these lists, from the output and LSE of all lists."""
        if self._absent_TH is not None:
            lse_TH = lse_TH.masked_fill(self._absent_TH, torch.inf)
        dout_AIF, out_AIF, lse_AI = map(self._query_tiles, (dout_THF, out_THF, lse_TH))
        dq_AID = torch.zeros_like(self._q_AID)
        dk_AED, dv_AEF = torch.zeros_like(self._k_AED), torch.zeros_like(self._v_AEF)
        for tiles_A, units_AK in self._chunks():
            part_AID, dk_AWD, dv_AWF = attend_backward(
                dout_AIF.index_select(0, tiles_A),
                self._q_AID.index_select(0, tiles_A),
                gathered(self._k_AED, units_AK),
                gathered(self._v_AEF, units_AK),
                out_AIF.index_select(0, tiles_A),
                lse_AI.index_select(0, tiles_A),
                softmax_scale=self._softmax_scale,
                mask_AIW=self._later_keys_1IW,
            )
            dq_AID.index_copy_(0, tiles_A, part_AID)
            for whole_AED, part_AWD in ((dk_AED, dk_AWD), (dv_AEF, dv_AWF)):
                whole_AED.index_add_(
                    0, units_AK.flatten(), part_AWD.reshape(-1, *whole_AED.shape[1:])
                )
        return self._query_rows(dq_AID), self._key_rows(dk_AED), self._key_rows(dv_AEF)

    def _query_tiles(self, x_TH: Tensor) -> Tensor:
        """[T, H, ...] to [A, I, ...], zeros past short blocks."""
        x = self._query_layout.to_blocks(x_TH).unflatten(2, (self._kv_heads, self._group))
        return x.movedim(2, 0).flatten(2, 3).flatten(0, 1).contiguous()

    def _query_rows(self, x_AI: Tensor) -> Tensor:
        """[A, I, ...] to [T, H, ...]."""
        x = x_AI.unflatten(0, (self._kv_heads, -1)).unflatten(2, (-1, self._group))
        return self._query_layout.from_blocks(x.movedim(0, 2).flatten(2, 3))

    def _key_units(self, x_TGD: Tensor) -> Tensor:
        """[T, G, D] to [A, E, D], zeros past short units."""
        x_UEGD = self._units.to_blocks(x_TGD) if self._units else x_TGD.unsqueeze(1)
        return x_UEGD.movedim(2, 0).flatten(0, 1).contiguous()

    def _key_rows(self, x_AED: Tensor) -> Tensor:
        """[A, E, D] to [T, G, D]."""
        x_UEGD = x_AED.unflatten(0, (self._kv_heads, -1)).movedim(0, 2)
        return self._units.from_blocks(x_UEGD) if self._units else x_UEGD.squeeze(1)

    def _chunks(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Tiles computed together, tiles_A, and their units as positions in [G * U], units_AK."""
        tiles = len(self._lists_AK) // self._kv_heads
        head_A = torch.arange(self._kv_heads, device=self._lists_AK.device)
        lists_AK = self._lists_AK + head_A.repeat_interleave(tiles)[:, None] * self._count
        counts_A, by_length_A = self._counts_A.sort(stable=True)
        lengths, sizes = counts_A.unique_consecutive(return_counts=True)
        for length, tiles_A in zip(
            lengths.tolist(), by_length_A.split(sizes.tolist()), strict=True
        ):
            if length == 0:
                continue
            rows, keys = self._q_AID.shape[1], length * self._unit_tokens
            for some_A in tiles_A.split(tiles_at_once(rows, keys, lists_AK.device)):
                yield some_A, lists_AK[some_A, :length]


def own_blocks(given: Inputs) -> GatheredLists:
    """The part of a selection that reads own blocks."""
    selection, kv_heads = given.selection, given.k_TGD.shape[1]
    listed_NG, absent_TH = own_listed_QC(selection), None
    if selection.by_token:
        listed_TH = listed_NG.repeat_interleave(given.q_THD.shape[1] // listed_NG.shape[1], 1)
        if not bool(listed_TH.all()):
            absent_TH = ~listed_TH
        listed_NBH = selection.query_layout.to_blocks(listed_TH)
        listed_NG = listed_NBH.any(1).unflatten(1, (kv_heads, -1)).any(2)
    lists_NGK = selection.own_block_N[:, None, None].expand(-1, kv_heads, 1)
    lists = lists_NGK, listed_NG, selection.kv_layout
    return GatheredLists(given, *lists, own_block=True, absent_TH=absent_TH)


def own_listed_QC(selection: Selection) -> Tensor:
    """Whether lists hold the own block of the row that selects, bool."""
    own_Q = selection.own_block_N
    if selection.by_token:
        own_Q = own_Q[selection.query_layout.block_T]
    return (selection.indices_QCK[..., 0] == own_Q[:, None]) & (selection.counts_QC > 0)


def without_own_blocks(selection: Selection) -> tuple[Tensor, Tensor, Tensor]:
    """Whether lists have own blocks, which come first, and lists without them and their lengths."""
    own_QC, lists_QCK = own_listed_QC(selection), selection.indices_QCK.int()
    lists_QCK = lists_QCK.where(~own_QC[..., None], pad(lists_QCK[..., 1:], (0, 1), value=-1))
    return own_QC, lists_QCK, selection.counts_QC - own_QC.int()


def gathered(x_XE: Tensor, rows_AI: Tensor) -> Tensor:
    """Rows of a tile side by side: [A, I * E, ...]."""
    return x_XE.index_select(0, rows_AI.flatten()).view(len(rows_AI), -1, *x_XE.shape[2:])


_KERNEL = AssembledKernel(past_blocks=_past_blocks, by_token=False)
forward, backward, obstacle = _KERNEL.forward, _KERNEL.backward, _KERNEL.obstacle
