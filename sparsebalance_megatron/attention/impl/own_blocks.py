# SPDX-License-Identifier: Apache-2.0
"""Every query's own block, up to the query itself: nothing is gathered, the keys lie side by side.

Shape legend: T tokens of the packed row (of queries or of keys), H query heads, G KV heads, D head
dim, N blocks of the queries' row, C heads that select, B tokens of a query block, E of a KV block,
A tiles (query blocks of all KV heads), I rows of a tile (B * H / G), J query blocks computed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebalance_megatron.attention.impl.tile_attention import (
    attend,
    attend_backward,
    host_may_read,
    later_keys_IW,
    tiles_at_once,
)
from sparsebalance_megatron.attention.selection import Selection


class OwnBlocks:
    """The part of a selection that reads own blocks. Tensors are of the dtype computed in."""

    def __init__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        softmax_scale: float,
    ) -> None:
        self._layout, self._kv_layout = selection.query_layout, selection.kv_layout
        self._heads, self._kv_heads = q_THD.shape[1], k_TGD.shape[1]
        self._q_NBHD = self._layout.to_blocks(q_THD)
        self._k_NEGD, self._v_NEGD = map(self._kv_layout.to_blocks, (k_TGD, v_TGD))
        self._softmax_scale = softmax_scale
        self._own_N = selection.own_block_N
        on_host = host_may_read(q_THD.device)
        if not on_host:
            # Whether the keys' row holds an own block stays unread: one of zeros stands in for it.
            self._k_NEGD, self._v_NEGD = map(_with_zeros, (self._k_NEGD, self._v_NEGD))
            self._own_N = self._own_N.masked_fill(self._own_N < 0, self._kv_layout.blocks)
        group = self._heads // self._kv_heads
        queries, keys = self._layout.block_tokens, self._kv_layout.block_tokens
        self._mask_1IE = later_keys_IW(queries, keys, group, q_THD.dtype, q_THD.device)[None]
        at_once = tiles_at_once(queries * group, keys, q_THD.device)
        listed_TC = own_listed_QC(selection)
        if not selection.by_token:
            listed_TC = listed_TC[self._layout.block_T]
        self._unread_TH = ~listed_TC.repeat_interleave(
            self._heads // listed_TC.shape[1], 1, output_size=self._heads
        )
        blocks_J = self._layout.number_N
        self._some_unread = True
        if on_host:
            self._some_unread = bool(self._unread_TH.any())
            if self._some_unread:
                blocks_J = self._layout.block_T[listed_TC.any(1)].unique_consecutive()
        self._chunks = blocks_J.split(max(1, at_once // self._kv_heads)) if len(blocks_J) else ()

    def forward(self) -> tuple[Tensor, Tensor]:
        """out_THD and lse_TH; 0 and -inf where a query's list lacks the own block."""
        out_NBHD = torch.zeros_like(self._q_NBHD)
        lse_NBH = out_NBHD.new_full(out_NBHD.shape[:-1], -torch.inf)
        for blocks_J in self._chunks:
            out_AID, lse_AI = attend(
                self._tiles(self._q_NBHD, blocks_J),
                *self._keys(blocks_J),
                softmax_scale=self._softmax_scale,
                mask_AIW=self._mask_1IE,
            )
            out_NBHD.index_copy_(0, blocks_J, self._rows(out_AID))
            lse_NBH.index_copy_(0, blocks_J, self._rows(lse_AI))
        out_THD, lse_TH = map(self._layout.from_blocks, (out_NBHD, lse_NBH))
        if self._some_unread:
            out_THD = out_THD.masked_fill(self._unread_TH[..., None], 0.0)
            lse_TH = lse_TH.masked_fill(self._unread_TH, -torch.inf)
        return out_THD, lse_TH

    def backward(
        self, dout_THD: Tensor, out_THD: Tensor, lse_TH: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients dq_THD, dk_TGD and dv_TGD; LSE +inf: a query that takes no part."""
        to_blocks, from_keys = self._layout.to_blocks, self._kv_layout.from_blocks
        if self._some_unread:
            lse_TH = lse_TH.masked_fill(self._unread_TH, torch.inf)
        dout_NBHD, out_NBHD, lse_NBH = map(to_blocks, (dout_THD, out_THD, lse_TH))
        dq_NBHD = torch.zeros_like(self._q_NBHD)
        dk_NEGD, dv_NEGD = (torch.zeros_like(self._k_NEGD) for _ in range(2))
        for blocks_J in self._chunks:
            dq_AID, dk_AED, dv_AED = attend_backward(
                self._tiles(dout_NBHD, blocks_J),
                self._tiles(self._q_NBHD, blocks_J),
                *self._keys(blocks_J),
                self._tiles(out_NBHD, blocks_J),
                self._tiles(lse_NBH, blocks_J),
                softmax_scale=self._softmax_scale,
                mask_AIW=self._mask_1IE,
            )
            dq_NBHD.index_copy_(0, blocks_J, self._rows(dq_AID))
            own_J = self._own_N[blocks_J]
            for whole_NEGD, part_AED in ((dk_NEGD, dk_AED), (dv_NEGD, dv_AED)):
                part = part_AED.unflatten(0, (-1, self._kv_heads)).transpose(1, 2)
                # index_add_ is an order of magnitude slower on a strided source.
                whole_NEGD.index_add_(0, own_J, part.contiguous())
        dk_TGD, dv_TGD = (from_keys(x[: self._kv_layout.blocks]) for x in (dk_NEGD, dv_NEGD))
        return self._layout.from_blocks(dq_NBHD), dk_TGD, dv_TGD

    def _keys(self, blocks_J: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of own blocks, [A, E, D]."""
        own_J = self._own_N[blocks_J]
        k, v = (
            x_NEGD.index_select(0, own_J).transpose(1, 2).flatten(0, 1)
            for x_NEGD in (self._k_NEGD, self._v_NEGD)
        )
        return k, v

    def _tiles(self, x_NBH: Tensor, blocks_J: Tensor) -> Tensor:
        """Some blocks of [N, B, H, ...] as tiles [A, I, ...], all heads of a group in one."""
        x = x_NBH.index_select(0, blocks_J).unflatten(2, (self._kv_heads, -1))
        return x.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def _rows(self, x_AI: Tensor) -> Tensor:
        """The inverse of :meth:`_tiles`."""
        x = x_AI.unflatten(0, (-1, self._kv_heads)).unflatten(2, (self._layout.block_tokens, -1))
        return x.transpose(1, 2).flatten(2, 3)


def own_listed_QC(selection: Selection) -> Tensor:
    """Which lists hold the own block of the row that selects, bool."""
    own_Q = selection.own_block_N
    if selection.by_token:
        own_Q = own_Q[selection.query_layout.block_T]
    return (selection.indices_QCK[..., 0] == own_Q[:, None]) & (selection.counts_QC > 0)


def _with_zeros(x_N: Tensor) -> Tensor:
    """One more block, of zeros."""
    return torch.cat((x_N, torch.zeros_like(x_N[:1])))
