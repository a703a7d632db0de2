# SPDX-License-Identifier: Apache-2.0
"""Attention of single tokens over their own lists of blocks: MoBA's semantics, on any device.

One selecting head at a time, one place of the lists at a time: the tokens whose k-th entry is the
same block are gathered into tiles, a tile attends to its block, and what a token gets from its
entries is merged by LSE. Time follows the budget; memory is linear in tokens, whatever the budget,
since a place of the lists gives every token at most one result. Tiles are padded, and their number
is bounded by what the host knows, so outside the CPU nothing waits for the device.

Shape legend: T tokens of the packed row (X: one more, a dummy that padding reads and writes),
H query heads, G KV heads, D head dim, N blocks of the row, B slots of a block, C heads that select,
E query heads of a selecting head, K width of lists, P tiles, M tokens of a tile, Q rows of a tile
(M * E).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.merge import merge_partials
from sparsebalance_megatron.attention.selection import Selection

_TILE_TOKENS = 64
_CHUNK_ELEMENTS = 1 << 19
"""Scores computed at once, per thread: 2 MiB in float32, about a core's share of the cache."""


def attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection by token; see :func:`..api.block_sparse_attention`.

    The own block must come first in each list that holds it. Computes in float32, or float64 for
    float64 inputs. Deterministic on the CPU; on CUDA where ``torch.use_deterministic_algorithms``
    makes ``index_add_`` so.
    """
    return _TokenAttention.apply(
        q_THD,
        k_TGD,
        v_TGD,
        selection.indices_RCK,
        selection.counts_RC,
        selection.layout,
        softmax_scale,
    )


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Tiles computed together; absent tokens are T, the dummy."""

    tokens_PM: Tensor
    blocks_P: Tensor


class _TokenAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        indices_TCK: Tensor,
        counts_TC: Tensor,
        layout: PackedLayout,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        out_THD = torch.empty_like(q_THD)
        lse_TH = torch.empty(q_THD.shape[:2], dtype=_wide(q_THD.dtype), device=q_THD.device)
        for head in range(indices_TCK.shape[1]):
            one = _SelectingHead(head, q_THD, k_TGD, v_TGD, indices_TCK, counts_TC, layout)
            out_TED, lse_TE = one.forward(softmax_scale)
            out_THD[:, one.query_heads] = out_TED.to(out_THD.dtype)
            lse_TH[:, one.query_heads] = lse_TE
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_TH, indices_TCK, counts_TC)
        ctx.layout, ctx.softmax_scale = layout, softmax_scale
        ctx.mark_non_differentiable(lse_TH)
        return out_THD, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_TH, indices_TCK, counts_TC = ctx.saved_tensors
        dq_THD = torch.empty_like(q_THD)
        dk_TGD = torch.zeros_like(k_TGD, dtype=_wide(k_TGD.dtype))
        dv_TGD = torch.zeros_like(dk_TGD)
        for head in range(indices_TCK.shape[1]):
            one = _SelectingHead(head, q_THD, k_TGD, v_TGD, indices_TCK, counts_TC, ctx.layout)
            heads = one.query_heads
            dq_TED, dk_TD, dv_TD = one.backward(
                dout_THD[:, heads], out_THD[:, heads], lse_TH[:, heads], ctx.softmax_scale
            )
            dq_THD[:, heads] = dq_TED.to(dq_THD.dtype)
            dk_TGD[:, one.kv_head] += dk_TD
            dv_TGD[:, one.kv_head] += dv_TD
        return dq_THD, dk_TGD.to(k_TGD.dtype), dv_TGD.to(v_TGD.dtype), None, None, None, None


class _SelectingHead:
    """One head that selects: its query heads, its KV head, its lists."""

    def __init__(
        self,
        head: int,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        indices_TCK: Tensor,
        counts_TC: Tensor,
        layout: PackedLayout,
    ) -> None:
        selecting_heads = indices_TCK.shape[1]
        group = q_THD.shape[1] // selecting_heads
        self.query_heads = slice(head * group, (head + 1) * group)
        self.kv_head = head * k_TGD.shape[1] // selecting_heads
        self._layout = layout
        self._dtype = _wide(q_THD.dtype)
        self._lists_TK, self._counts_T = indices_TCK[:, head], counts_TC[:, head]
        self._q_XED = self._with_dummy(q_THD[:, self.query_heads])
        self._k_NBD, self._v_NBD = (
            layout.to_blocks(x_TGD[:, self.kv_head].to(self._dtype)) for x_TGD in (k_TGD, v_TGD)
        )

    def forward(self, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """out_TED and lse_TE."""
        out_XED = torch.zeros_like(self._q_XED)
        lse_XE = out_XED.new_full(out_XED.shape[:2], -torch.inf)
        for place in range(self._lists_TK.shape[1]):
            part_XED = torch.zeros_like(out_XED)
            part_lse_XE = torch.full_like(lse_XE, -torch.inf)
            for tiles in self._tiles(place):
                s_PQB = self._scores(tiles, masked=place == 0).mul_(softmax_scale)
                lse_PQ = s_PQB.logsumexp(-1)
                p_PQB = s_PQB.sub_(lse_PQ.unsqueeze(-1)).exp_()
                o_PQD = torch.bmm(p_PQB, self._v_NBD.index_select(0, tiles.blocks_P))
                token = tiles.tokens_PM.flatten()
                part_XED.index_copy_(0, token, o_PQD.view(-1, *out_XED.shape[1:]))
                part_lse_XE.index_copy_(0, token, lse_PQ.view(-1, lse_XE.shape[1]))
            out_XED, lse_XE = merge_partials(out_XED, lse_XE, part_XED, part_lse_XE)
        return out_XED[:-1], lse_XE[:-1]

    def backward(
        self, dout_TED: Tensor, out_TED: Tensor, lse_TE: Tensor, softmax_scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dq_TED, dk_TD and dv_TD of this head alone, in the dtype computed in."""
        dout_XED = self._with_dummy(dout_TED)
        delta_XE1 = (dout_XED * self._with_dummy(out_TED)).sum(-1, keepdim=True)
        # The dummy's infinite lse makes its probabilities 0.
        lse_XE1 = pad(lse_TE, (0, 0, 0, 1), value=torch.inf).unsqueeze(-1)
        dq_XED = torch.zeros_like(self._q_XED)
        dk_NBD, dv_NBD = torch.zeros_like(self._k_NBD), torch.zeros_like(self._v_NBD)
        for place in range(self._lists_TK.shape[1]):
            for tiles in self._tiles(place):
                blocks_P = tiles.blocks_P
                p_PQB = self._scores(tiles, masked=place == 0).mul_(softmax_scale)
                p_PQB.sub_(_rows(lse_XE1, tiles)).exp_()
                do_PQD = _rows(dout_XED, tiles)
                dv_NBD.index_add_(0, blocks_P, torch.bmm(p_PQB.transpose(1, 2), do_PQD))
                v_PBD = self._v_NBD.index_select(0, blocks_P)
                ds_PQB = torch.bmm(do_PQD, v_PBD.transpose(1, 2))
                ds_PQB.sub_(_rows(delta_XE1, tiles)).mul_(p_PQB)
                dq_PQD = torch.bmm(ds_PQB, self._k_NBD.index_select(0, blocks_P))
                dq_XED.index_add_(0, tiles.tokens_PM.flatten(), dq_PQD.view(-1, *dq_XED.shape[1:]))
                dk_PBD = torch.bmm(ds_PQB.transpose(1, 2), _rows(self._q_XED, tiles))
                dk_NBD.index_add_(0, blocks_P, dk_PBD)
        from_blocks = self._layout.from_blocks
        return (
            dq_XED[:-1].mul_(softmax_scale),
            from_blocks(dk_NBD.mul_(softmax_scale)),
            from_blocks(dv_NBD),
        )

    def _with_dummy(self, x_TED: Tensor) -> Tensor:
        return pad(x_TED.to(self._dtype), (0, 0) * (x_TED.ndim - 1) + (0, 1))

    def _scores(self, tiles: _Tiles, *, masked: bool) -> Tensor:
        """Unscaled scores of a chunk; -inf at later keys, which only the own block has."""
        k_PBD = self._k_NBD.index_select(0, tiles.blocks_P)
        s_PQB = torch.bmm(_rows(self._q_XED, tiles), k_PBD.transpose(1, 2))
        if masked:
            slot_B = torch.arange(self._layout.slots, device=s_PQB.device)
            key_PB = self._layout.start_N[tiles.blocks_P][:, None] + slot_B
            later_PMB = key_PB[:, None, :] > tiles.tokens_PM[:, :, None]
            s_PQB.unflatten(1, (tiles.tokens_PM.shape[1], -1)).masked_fill_(
                later_PMB[:, :, None, :], -torch.inf
            )
        return s_PQB

    def _tiles(self, place: int) -> Iterator[_Tiles]:
        """Chunks of tiles that hold each token's entry at this place of its list."""
        tokens, blocks = self._lists_TK.shape[0], self._layout.blocks
        slots, group = self._layout.slots, self._q_XED.shape[1]
        size = min(_TILE_TOKENS, max(16, slots))
        tokens_PM, blocks_P = _gather_tiles(
            self._lists_TK[:, place].masked_fill(self._counts_T <= place, blocks),
            blocks,
            size,
            absent=tokens,
        )
        if blocks_P.shape[0] == 0:
            return
        on_cpu = self._lists_TK.device.type == "cpu"
        elements = _CHUNK_ELEMENTS * (torch.get_num_threads() if on_cpu else 64)
        length = max(1, elements // (size * group * slots))
        for chunk_PM, chunk_P in zip(tokens_PM.split(length), blocks_P.split(length), strict=True):
            yield _Tiles(tokens_PM=chunk_PM, blocks_P=chunk_P)


def _gather_tiles(block_T: Tensor, blocks: int, size: int, *, absent: int) -> tuple[Tensor, Tensor]:
    """Tokens of the same block, ``size`` to a tile: tokens_PM (``absent`` where none) and blocks_P.

    ``block_T`` is ``blocks`` where a token has none. A stable sort, hence the same each time.
    """
    device, tokens = block_T.device, block_T.shape[0]
    sorted_T, token_T = block_T.sort(stable=True)
    number = torch.arange(blocks + 1, device=device, dtype=block_T.dtype)
    bound_N1 = torch.searchsorted(sorted_T, number)
    tiles_N = (bound_N1.diff() + (size - 1)).div(size, rounding_mode="floor")
    end_N = tiles_N.cumsum(0)
    tile_P = torch.arange(_tile_count(end_N, tokens // size + blocks), device=device)
    block_P = torch.searchsorted(end_N, tile_P, right=True).clamp(max=blocks - 1)
    first_P = (tile_P - (end_N - tiles_N)[block_P]) * size + bound_N1[block_P]
    place_PM = first_P[:, None] + torch.arange(size, device=device)
    present_PM = place_PM < bound_N1[block_P + 1][:, None]
    tokens_PM = token_T[place_PM.clamp(max=tokens - 1)].masked_fill(~present_PM, absent)
    return tokens_PM, block_P


def _tile_count(end_N: Tensor, most: int) -> int:
    """As many tiles as there are; off the CPU, where reading that stops the host, as may be."""
    return int(end_N[-1]) if end_N.device.type == "cpu" else most


def _rows(x_XED: Tensor, tiles: _Tiles) -> Tensor:
    """A tile's tokens with their heads, [P, Q, any]."""
    x = x_XED.index_select(0, tiles.tokens_PM.flatten())
    return x.view(tiles.tokens_PM.shape[0], -1, x_XED.shape[-1])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
