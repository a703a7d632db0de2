# SPDX-License-Identifier: Apache-2.0
"""Attention of single tokens over their own lists of blocks: MoBA's semantics, on any device.

One selecting head at a time, one place of the lists at a time: the tokens whose k-th entry is the
same block are gathered into tiles, a tile attends to its block, and what a token gets from its
entries is merged by LSE. Time follows the budget; memory is linear in tokens, whatever the budget,
since a place of the lists gives every token at most one result. Tiles are padded, and their number
is bounded by what the host knows, so outside the CPU nothing waits for the device.

Shape legend: T tokens of the packed row (of queries, X: one more, a dummy that padding reads and
writes; or of keys), H query heads, G KV heads, D head dim, N blocks of the keys' row, K places of a
list, B tokens of a KV block, Q rows and C heads that select, E query heads of a selecting head,
A tiles, I tokens of a tile, Y rows of a tile (I * E).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.kernel import obstacle_of_lists, wide_dtype
from sparsebalance_megatron.attention.merge import merge_partials
from sparsebalance_megatron.attention.selection import Selection

_TILE_TOKENS = 64
_CHUNK_ELEMENTS = 1 << 19
"""Scores computed at once, per thread: 2 MiB in float32, about a core's share of the cache."""


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection by token; see :class:`..kernel.Kernel`.

    Computes in float32, or float64 for float64 inputs. Deterministic on the CPU; on CUDA where
    ``torch.use_deterministic_algorithms`` makes ``index_add_`` so.
    """
    out_THD = torch.empty_like(q_THD)
    lse_TH = torch.empty(q_THD.shape[:2], dtype=wide_dtype(q_THD.dtype), device=q_THD.device)
    for head in range(selection.counts_QC.shape[1]):
        one = _SelectingHead(head, q_THD, k_TGD, v_TGD, selection)
        out_TED, lse_TE = one.forward(softmax_scale)
        out_THD[:, one.query_heads] = out_TED.to(out_THD.dtype)
        lse_TH[:, one.query_heads] = lse_TE
    return out_THD, lse_TH


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    selection: Selection,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, as deterministic as :func:`forward`; see :class:`..kernel.Kernel`."""
    dq_THD = torch.empty_like(q_THD)
    dk_TGD = torch.zeros_like(k_TGD, dtype=wide_dtype(k_TGD.dtype))
    dv_TGD = torch.zeros_like(dk_TGD)
    for head in range(selection.counts_QC.shape[1]):
        one = _SelectingHead(head, q_THD, k_TGD, v_TGD, selection)
        heads = one.query_heads
        dq_TED, dk_TD, dv_TD = one.backward(
            dout_THD[:, heads], out_THD[:, heads], lse_TH[:, heads], softmax_scale
        )
        dq_THD[:, heads] = dq_TED.to(dq_THD.dtype)
        dk_TGD[:, one.kv_head] += dk_TD
        dv_TGD[:, one.kv_head] += dv_TD
    return dq_THD, dk_TGD.to(k_TGD.dtype), dv_TGD.to(v_TGD.dtype)


def obstacle(q_THD: Tensor, selection: Selection) -> str | None:
    """Refuse selections by query block."""
    return obstacle_of_lists(selection, by_token=True)


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Tiles computed together; absent tokens are T, the dummy."""

    tokens_AI: Tensor
    blocks_A: Tensor


class _SelectingHead:
    """One head that selects: its query heads, its KV head, its lists."""

    def __init__(
        self, head: int, q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection
    ) -> None:
        selecting_heads = selection.counts_QC.shape[1]
        group = q_THD.shape[1] // selecting_heads
        self.query_heads = slice(head * group, (head + 1) * group)
        self.kv_head = head * k_TGD.shape[1] // selecting_heads
        self._kv_layout = selection.kv_layout
        self._dtype = wide_dtype(q_THD.dtype)
        self._lists_TK = selection.indices_QCK[:, head]
        self._counts_T = selection.counts_QC[:, head]
        self._q_XED = self._with_dummy(q_THD[:, self.query_heads])
        self._k_NBD, self._v_NBD = (
            self._kv_layout.to_blocks(x_TGD[:, self.kv_head].to(self._dtype))
            for x_TGD in (k_TGD, v_TGD)
        )
        layout = selection.query_layout
        own_T = selection.own_block_N[layout.block_T]
        place_T = torch.arange(layout.tokens, device=own_T.device) - layout.start_N[layout.block_T]
        # The dummy has no own block, so that its scores stay finite.
        self._own_X, self._place_X = pad(own_T, (0, 1), value=-1), pad(place_T, (0, 1))

    def forward(self, softmax_scale: float) -> tuple[Tensor, Tensor]:
        """out_TED and lse_TE."""
        out_XED = torch.zeros_like(self._q_XED)
        lse_XE = out_XED.new_full(out_XED.shape[:2], -torch.inf)
        for place in range(self._lists_TK.shape[1]):
            part_XED = torch.zeros_like(out_XED)
            part_lse_XE = torch.full_like(lse_XE, -torch.inf)
            for tiles in self._tiles(place):
                s_AYB = self._scores(tiles, masked=place == 0).mul_(softmax_scale)
                lse_AY = s_AYB.logsumexp(-1)
                p_AYB = s_AYB.sub_(lse_AY.unsqueeze(-1)).exp_()
                o_AYD = torch.bmm(p_AYB, self._v_NBD.index_select(0, tiles.blocks_A))
                token = tiles.tokens_AI.flatten()
                part_XED.index_copy_(0, token, o_AYD.view(-1, *out_XED.shape[1:]))
                part_lse_XE.index_copy_(0, token, lse_AY.view(-1, lse_XE.shape[1]))
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
                blocks_A = tiles.blocks_A
                p_AYB = self._scores(tiles, masked=place == 0).mul_(softmax_scale)
                p_AYB.sub_(_rows(lse_XE1, tiles)).exp_()
                do_AYD = _rows(dout_XED, tiles)
                dv_NBD.index_add_(0, blocks_A, torch.bmm(p_AYB.transpose(1, 2), do_AYD))
                v_ABD = self._v_NBD.index_select(0, blocks_A)
                ds_AYB = torch.bmm(do_AYD, v_ABD.transpose(1, 2))
                ds_AYB.sub_(_rows(delta_XE1, tiles)).mul_(p_AYB)
                dq_AYD = torch.bmm(ds_AYB, self._k_NBD.index_select(0, blocks_A))
                dq_XED.index_add_(0, tiles.tokens_AI.flatten(), dq_AYD.view(-1, *dq_XED.shape[1:]))
                dk_ABD = torch.bmm(ds_AYB.transpose(1, 2), _rows(self._q_XED, tiles))
                dk_NBD.index_add_(0, blocks_A, dk_ABD)
        from_blocks = self._kv_layout.from_blocks
        return (
            dq_XED[:-1].mul_(softmax_scale),
            from_blocks(dk_NBD.mul_(softmax_scale)),
            from_blocks(dv_NBD),
        )

    def _with_dummy(self, x_TED: Tensor) -> Tensor:
        return pad(x_TED.to(self._dtype), (0, 0) * (x_TED.ndim - 1) + (0, 1))

    def _scores(self, tiles: _Tiles, *, masked: bool) -> Tensor:
        """Unscaled scores of a chunk; -inf at later keys, which only the own block has."""
        k_ABD = self._k_NBD.index_select(0, tiles.blocks_A)
        s_AYB = torch.bmm(_rows(self._q_XED, tiles), k_ABD.transpose(1, 2))
        if masked:
            place_B = torch.arange(self._kv_layout.block_tokens, device=s_AYB.device)
            own_AI = self._own_X[tiles.tokens_AI] == tiles.blocks_A[:, None]
            later_AIB = own_AI[:, :, None] & (place_B > self._place_X[tiles.tokens_AI][:, :, None])
            s_AYB.unflatten(1, (tiles.tokens_AI.shape[1], -1)).masked_fill_(
                later_AIB[:, :, None, :], -torch.inf
            )
        return s_AYB

    def _tiles(self, place: int) -> Iterator[_Tiles]:
        """Chunks of tiles that hold each token's entry at this place of its list."""
        tokens, blocks = self._lists_TK.shape[0], self._kv_layout.blocks
        block_tokens, group = self._kv_layout.block_tokens, self._q_XED.shape[1]
        size = min(_TILE_TOKENS, max(16, block_tokens))
        tokens_AI, blocks_A = _gather_tiles(
            self._lists_TK[:, place].masked_fill(self._counts_T <= place, blocks),
            blocks,
            size,
            absent=tokens,
        )
        if blocks_A.shape[0] == 0:
            return
        on_cpu = self._lists_TK.device.type == "cpu"
        elements = _CHUNK_ELEMENTS * (torch.get_num_threads() if on_cpu else 64)
        length = max(1, elements // (size * group * block_tokens))
        for chunk_AI, chunk_A in zip(tokens_AI.split(length), blocks_A.split(length), strict=True):
            yield _Tiles(tokens_AI=chunk_AI, blocks_A=chunk_A)


def _gather_tiles(block_T: Tensor, blocks: int, size: int, *, absent: int) -> tuple[Tensor, Tensor]:
    """Tokens of the same block, ``size`` to a tile: tokens_AI (``absent`` where none) and blocks_A.

    ``block_T`` is ``blocks`` where a token has none. A stable sort, hence the same each time.
    """
    device, tokens = block_T.device, block_T.shape[0]
    sorted_T, token_T = block_T.sort(stable=True)
    number = torch.arange(blocks + 1, device=device, dtype=block_T.dtype)
    bound_N1 = torch.searchsorted(sorted_T, number)
    tiles_N = (bound_N1.diff() + (size - 1)).div(size, rounding_mode="floor")
    end_N = tiles_N.cumsum(0)
    tile_A = torch.arange(_tile_count(end_N, tokens // size + blocks), device=device)
    block_A = torch.searchsorted(end_N, tile_A, right=True).clamp(max=blocks - 1)
    first_A = (tile_A - (end_N - tiles_N)[block_A]) * size + bound_N1[block_A]
    place_AI = first_A[:, None] + torch.arange(size, device=device)
    present_AI = place_AI < bound_N1[block_A + 1][:, None]
    tokens_AI = token_T[place_AI.clamp(max=tokens - 1)].masked_fill(~present_AI, absent)
    return tokens_AI, block_A


def _tile_count(end_N: Tensor, most: int) -> int:
    """As many tiles as there are; off the CPU, where reading that stops the host, as may be."""
    return int(end_N[-1]) if end_N.device.type == "cpu" else most


def _rows(x_XED: Tensor, tiles: _Tiles) -> Tensor:
    """A tile's tokens with their heads, [A, Y, any]."""
    x = x_XED.index_select(0, tiles.tokens_AI.flatten())
    return x.view(tiles.tokens_AI.shape[0], -1, x_XED.shape[-1])
