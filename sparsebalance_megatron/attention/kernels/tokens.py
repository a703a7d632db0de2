# SPDX-License-Identifier: Apache-2.0
"""Attention of single tokens over their own lists of blocks: MoBA's semantics, on any device.

Past blocks are computed one by one for each KV head: the rows whose lists name a block
are gathered into tiles, which attend to it. A row's results lie in different tiles; one weighted
sum puts them together. All tiles have one shape, and a row's place in its block's tiles follows
from the rows before it: no bit of its result depends on what later rows choose. On CUDA the host
waits to read how many tiles there are.

Shape legend: T tokens of the packed sequence (of queries or of keys), U of several tensors side by
side, N blocks of the keys' sequence, X rows of a KV head that select (a token's selecting heads
side by side; where a dummy is added, it is what padding reads and writes), E query heads of a row,
B tokens of a KV block, A tiles, I rows of a tile, Y query heads of all rows of a tile (I * E), Z
places in all tiles (A * Y).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from sparsebalance_megatron.attention.kernels.blocks import AssembledKernel, gathered, own_listed_QC
from sparsebalance_megatron.attention.kernels.contract import Inputs
from sparsebalance_megatron.attention.kernels.tile_attention import (
    attend,
    attend_backward,
    tiles_at_once,
)

_PLACES_AT_ONCE = 8
_TILE_ROWS = (768, 256, 128, 64, 32, 16)
"""Query heads of a tile's rows. Few are slow, many leave a block's last tile empty."""
_LEAST_TILES = 2
"""Tiles that a block's readers should fill on average."""


_KERNEL = AssembledKernel(past_blocks=lambda given: [_PastBlocks(given)], by_token=True)
forward, backward, obstacle = _KERNEL.forward, _KERNEL.backward, _KERNEL.obstacle


@dataclass(frozen=True, kw_only=True)
class _Tiles:
    """Readers of blocks, in tiles of one shape.

    ``rows_AI``: numbers of rows, X where a tile is padded. ``blocks_A``: what a tile reads.
    ``place_XK``: where an entry of a list went, in [A * I]; A * I where there is none.
    ``at_once``: tiles of one call, which divides A.
    """

    rows_AI: Tensor
    blocks_A: Tensor
    place_XK: Tensor
    at_once: int


class _PastBlocks:
    """The KV heads of a selection, and the past blocks that their lists name."""

    def __init__(self, given: Inputs) -> None:
        selection = given.selection
        self._layout, self._softmax_scale = selection.kv_layout, given.softmax_scale
        self._q_THD, self._k_TGD, self._v_TGF = given.qkv
        self._kv_heads = given.k_TGD.shape[1]
        self._rows_per_token = selection.counts_QC.shape[1] // self._kv_heads
        self._heads = given.q_THD.shape[1] // selection.counts_QC.shape[1]
        lists_QCK, blocks = selection.indices_QCK.int(), self._layout.blocks
        place_K = torch.arange(lists_QCK.shape[2], device=lists_QCK.device)
        absent_QCK = place_K >= selection.counts_QC[..., None]
        absent_QCK[..., 0] |= own_listed_QC(selection)
        self._lists_QCK = lists_QCK.masked_fill(absent_QCK, blocks)

    def forward(self, out_THF: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        for head, heads, k_NBD, v_NBF in self._of_heads():
            out_XEF, lse_XE = self._by_row(out_THF[:, heads]), self._by_row(lse_TH[:, heads])
            q_XED = self._with_dummy(self._q_THD[:, heads])
            for tiles in self._tiles(head):
                places = tiles.rows_AI.numel() * self._heads + 1
                parts_ZF = q_XED.new_empty(places, v_NBF.shape[2])
                lse_Z = q_XED.new_empty(len(parts_ZF))
                # What an absent entry points to.
                parts_ZF[-1], lse_Z[-1] = 0.0, -torch.inf
                for chunk, rows_AI, blocks_A in self._chunks(tiles):
                    o_AYF, lse_AY = attend(
                        gathered(q_XED, rows_AI),
                        k_NBD.index_select(0, blocks_A),
                        v_NBF.index_select(0, blocks_A),
                        softmax_scale=self._softmax_scale,
                    )
                    parts_ZF[chunk], lse_Z[chunk] = o_AYF.flatten(0, 1), lse_AY.flatten()
                out_XEF, lse_XE = self._merged(out_XEF, lse_XE, parts_ZF, lse_Z, tiles.place_XK)
            out_THF[:, heads], lse_TH[:, heads] = self._by_token(out_XEF), self._by_token(lse_XE)
        return out_THF, lse_TH

    def backward(
        self, dout_THF: Tensor, out_THF: Tensor, lse_TH: Tensor, gradients: Sequence[Tensor]
    ) -> None:
        dq_THD, dk_TGD, dv_TGF = gradients
        for head, heads, k_NBD, v_NBF in self._of_heads():
            lse_XE = pad(self._by_row(lse_TH[:, heads]), (0, 0, 0, 1), value=torch.inf)
            # One gather serves for all three, and each is a view of it.
            rows = [x[:, heads] for x in (dout_THF, self._q_THD, out_THF)]
            rows_XEU, widths = self._with_dummy(*rows), [x.shape[2] for x in rows]
            dq_XED = self._with_dummy(dq_THD[:, heads])
            dk_NBD, dv_NBF = torch.zeros_like(k_NBD), torch.zeros_like(v_NBF)
            for tiles in self._tiles(head):
                for _, rows_AI, blocks_A in self._chunks(tiles):
                    dout_AYF, q_AYD, out_AYF = gathered(rows_XEU, rows_AI).split(widths, 2)
                    dq_AYD, dk_ABD, dv_ABF = attend_backward(
                        dout_AYF,
                        q_AYD,
                        k_NBD.index_select(0, blocks_A),
                        v_NBF.index_select(0, blocks_A),
                        out_AYF,
                        gathered(lse_XE, rows_AI),
                        softmax_scale=self._softmax_scale,
                    )
                    dq_XED.index_add_(0, rows_AI.flatten(), dq_AYD.reshape(-1, *dq_XED.shape[1:]))
                    dk_NBD.index_add_(0, blocks_A, dk_ABD)
                    dv_NBF.index_add_(0, blocks_A, dv_ABF)
            dq_THD[:, heads] = self._by_token(dq_XED[:-1])
            dk_TGD[:, head] += self._layout.from_blocks(dk_NBD)
            dv_TGF[:, head] += self._layout.from_blocks(dv_NBF)

    def _of_heads(self) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
        """Every KV head, its query heads, and its keys and values by block."""
        number, to_blocks = self._rows_per_token * self._heads, self._layout.to_blocks
        for head in range(self._kv_heads):
            heads = slice(head * number, (head + 1) * number)
            yield head, heads, to_blocks(self._k_TGD[:, head]), to_blocks(self._v_TGF[:, head])

    def _by_row(self, x_TH: Tensor) -> Tensor:
        """A KV head's query heads, [T, H / G, ...] to [X, E, ...]."""
        return x_TH.unflatten(1, (self._rows_per_token, self._heads)).flatten(0, 1).contiguous()

    def _with_dummy(self, *xs_THD: Tensor) -> Tensor:
        """:meth:`_by_row` of several tensors, their head dims side by side, [X, E, U]; the dummy
        is zeros."""
        rows, widths = self._rows_per_token * xs_THD[0].shape[0], [x.shape[2] for x in xs_THD]
        rows_XEU = xs_THD[0].new_empty(rows + 1, self._heads, sum(widths))
        by_token = rows_XEU[:-1].unflatten(0, (-1, self._rows_per_token)).split(widths, -1)
        for place, x_THD in zip(by_token, xs_THD, strict=True):
            place.copy_(x_THD.unflatten(1, (self._rows_per_token, -1)))
        rows_XEU[-1] = 0.0
        return rows_XEU

    def _by_token(self, x_XE: Tensor) -> Tensor:
        """The inverse of :meth:`_by_row`."""
        return x_XE.unflatten(0, (-1, self._rows_per_token)).flatten(1, 2)

    def _tiles(self, head: int) -> Iterator[_Tiles]:
        """The tiles of some places of all lists, then of the next."""
        some = slice(head * self._rows_per_token, (head + 1) * self._rows_per_token)
        for lists_XK in self._lists_QCK[:, some].flatten(0, 1).split(_PLACES_AT_ONCE, 1):
            size = self._tile_rows(lists_XK.shape[1])
            at_once = tiles_at_once(size * self._heads, self._layout.block_tokens, lists_XK.device)
            yield _gathered_tiles(lists_XK, self._layout.blocks, size, at_once)

    def _tile_rows(self, places: int) -> int:
        """I: by how many would read a block if all lists were full, which the host knows."""
        readers = places * self._layout.block_tokens * self._rows_per_token * self._heads
        fitting = (size for size in _TILE_ROWS if _LEAST_TILES * size <= readers)
        return max(1, next(fitting, _TILE_ROWS[-1]) // self._heads)

    def _chunks(self, tiles: _Tiles) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Tiles of one call: their places in Z, their rows and their blocks."""
        count, size = tiles.rows_AI.shape
        for first in range(0, count, tiles.at_once):
            some = slice(first, first + tiles.at_once)
            places = slice(*(x * size * self._heads for x in (some.start, some.stop)))
            yield places, tiles.rows_AI[some], tiles.blocks_A[some]

    def _merged(
        self, out_XEF: Tensor, lse_XE: Tensor, parts_ZF: Tensor, lse_Z: Tensor, place_XK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Put a row's results together with what it has."""
        heads = out_XEF.shape[1]
        number_E1 = torch.arange(heads, device=place_XK.device)[:, None]
        place_XEK = (place_XK[:, None] * heads + number_E1).clamp_(max=len(lse_Z) - 1)
        lse_XEK = lse_Z[place_XEK]
        total_XE = torch.cat((lse_XEK, lse_XE[..., None]), -1).logsumexp(-1)
        lowest = torch.finfo(total_XE.dtype).min
        finite_XE1 = total_XE.clamp(min=lowest)[..., None]
        merged = embedding_bag(
            place_XEK.flatten(0, 1),
            parts_ZF,
            mode="sum",
            per_sample_weights=lse_XEK.sub_(finite_XE1).exp_().flatten(0, 1),
        )
        share_XE1 = (lse_XE[..., None] - finite_XE1).exp_()
        return merged.view(out_XEF.shape).addcmul_(out_XEF, share_XE1), total_XE


def _gathered_tiles(block_XK: Tensor, blocks: int, size: int, at_once: int) -> _Tiles:
    """Rows of the same block, ``size`` to a tile; a multiple of ``at_once`` tiles.

    ``block_XK`` is ``blocks`` where a list has no entry. A stable sort, hence the same each time.
    """
    device, (rows, places) = block_XK.device, block_XK.shape
    number = torch.arange(blocks + 1, device=device, dtype=block_XK.dtype)
    sorted_U, entry_U = block_XK.flatten().sort(stable=True)
    bound_N1 = torch.searchsorted(sorted_U, number)
    tiles_N = (bound_N1.diff() + (size - 1)).div(size, rounding_mode="floor")
    end_N = tiles_N.cumsum(0)
    tile_A = torch.arange(-(-int(end_N[-1]) // at_once) * at_once, device=device)
    blocks_A = torch.searchsorted(end_N, tile_A, right=True).clamp_(max=blocks - 1)
    # Where a block's readers go: their places in the order, moved by what is padded before.
    moved_N = (end_N - tiles_N) * size - bound_N1[:-1]
    place_AI = tile_A[:, None] * size + torch.arange(size, device=device)
    place_AI -= moved_N[blocks_A][:, None]
    padding_AI = place_AI >= bound_N1[blocks_A + 1][:, None]
    rows_AI = entry_U[place_AI.clamp_(max=len(entry_U) - 1)].div_(places, rounding_mode="floor")
    place_U = torch.arange(len(entry_U), device=device)
    place_U += pad(moved_N, (0, 1))[sorted_U.long()]
    place_U.masked_fill_(sorted_U == blocks, tile_A.numel() * size)
    place_XK = torch.empty_like(place_U).index_copy_(0, entry_U, place_U).view(rows, places)
    return _Tiles(
        rows_AI=rows_AI.masked_fill_(padding_AI, rows),
        blocks_A=blocks_A,
        place_XK=place_XK,
        at_once=at_once,
    )
