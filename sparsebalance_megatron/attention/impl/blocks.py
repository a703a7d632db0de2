# SPDX-License-Identifier: Apache-2.0
"""Attention of query blocks over gathered KV blocks: time and memory follow the budget.

A tile is one query block of one KV head, with the group's query heads stacked as its rows. Tiles
with lists of one length are computed together: gather their KV blocks, two products forward, five
backward. Lists are turned round, so that a query block's own block comes last and the causal mask
falls on the last columns of a tile; past blocks are always full, hence need none. On the CPU a
tile's rows are worked off in spans: scores stay in the cache, and a span leaves out the own columns
that none of its rows sees.

Scores are in units of log2, because exp2 is the fastest exponential torch has on a CPU.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, N blocks of the
row, B slots of a block, P tiles (G * N in all), M rows of a tile (B * H / G) or of its span, K
width of lists, W columns of a tile (list length * B), V those of a span.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection

_LOG2_E = math.log2(math.e)
_CHUNK_ELEMENTS = 1 << 18
"""Scores computed at once, per thread: 1 MiB in float32, about a core's second-level cache."""
_LEAST_SPAN_ROWS = 256
"""Rows of a span, at least: products of fewer are slow."""


def attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a query-block selection; see :func:`..api.block_sparse_attention`.

    Computes in float32, or float64 for float64 inputs. Deterministic on the CPU; on CUDA where
    ``torch.use_deterministic_algorithms`` makes ``index_add_`` so.
    """
    return _BlockAttention.apply(
        q_THD,
        k_TGD,
        v_TGD,
        selection.indices_RCK,
        selection.counts_RC,
        selection.layout,
        softmax_scale,
    )


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Tiles computed together, and their KV blocks as positions in [G * N], the own one last.

    Added to scores: ``own_PB1B`` to those of the last block, None where no list holds the own
    block; ``padding_P1K1`` to [P, M, K, B], None where all lists are full. Rows are worked off in
    ``spans``: slots from and to.
    """

    tiles_P: Tensor
    blocks_PK: Tensor
    own_PB1B: Tensor | None
    padding_P1K1: Tensor | None
    spans: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Rows of a chunk's tiles, and the columns that they can see."""

    rows: slice
    columns: int


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        indices_NGK: Tensor,
        counts_NG: Tensor,
        layout: PackedLayout,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        tiling = _Tiling(layout, q_THD, k_TGD, softmax_scale)
        q_PMD = tiling.query_tiles(q_THD)
        k_PBD, v_PBD = tiling.key_blocks(k_TGD), tiling.key_blocks(v_TGD)
        out_PMD = torch.zeros_like(q_PMD)
        lse_PM1 = q_PMD.new_full((*q_PMD.shape[:2], 1), -torch.inf)
        scratch = tiling.scratch(indices_NGK.shape[2])
        for chunk in tiling.chunks(indices_NGK, counts_NG):
            k_PWD, v_PWD = _gather(k_PBD, chunk.blocks_PK), _gather(v_PBD, chunk.blocks_PK)
            for span in tiling.spans(chunk):
                s_PMV = tiling.scores(chunk, span, q_PMD, k_PWD, scratch)
                # The clamps touch only rows without any key: their maximum is -inf, their sum 0.
                peak_PM1 = s_PMV.amax(-1, keepdim=True).clamp_(min=tiling.lowest)
                sum_PM1 = s_PMV.sub_(peak_PM1).exp2_().sum(-1, keepdim=True)
                o_PMD = torch.bmm(s_PMV, v_PWD[:, : span.columns]).div_(sum_PM1.clamp(min=1.0))
                out_PMD[:, span.rows].index_copy_(0, chunk.tiles_P, o_PMD)
                lse_PM1[:, span.rows].index_copy_(0, chunk.tiles_P, sum_PM1.log2_().add_(peak_PM1))
        out_THD = tiling.query_rows(out_PMD).to(q_THD.dtype)
        lse_TH = tiling.query_rows(lse_PM1).squeeze(-1).div_(_LOG2_E)
        ctx.save_for_backward(q_THD, k_TGD, v_TGD, out_THD, lse_TH, indices_NGK, counts_NG)
        ctx.layout, ctx.softmax_scale = layout, softmax_scale
        ctx.mark_non_differentiable(lse_TH)
        return out_THD, lse_TH

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_THD: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        q_THD, k_TGD, v_TGD, out_THD, lse_TH, indices_NGK, counts_NG = ctx.saved_tensors
        tiling = _Tiling(ctx.layout, q_THD, k_TGD, ctx.softmax_scale)
        q_PMD = tiling.query_tiles(q_THD)
        k_PBD, v_PBD = tiling.key_blocks(k_TGD), tiling.key_blocks(v_TGD)
        dout_PMD = tiling.query_tiles(dout_THD)
        delta_TH1 = (dout_THD.to(tiling.dtype) * out_THD).sum(-1, keepdim=True)
        delta_PM1 = tiling.query_tiles(delta_TH1)
        lse_PM1 = tiling.query_tiles(lse_TH.unsqueeze(-1)).mul(_LOG2_E).clamp_(min=tiling.lowest)
        dq_PMD = torch.zeros_like(q_PMD)
        # Products with the short side first are the faster ones, hence D before B.
        dk_PDB = torch.zeros_like(k_PBD).transpose(1, 2).contiguous()
        dv_PDB = torch.zeros_like(dk_PDB)
        width = indices_NGK.shape[2]
        scratch, second_scratch = tiling.scratch(width), tiling.scratch(width)
        for chunk in tiling.chunks(indices_NGK, counts_NG):
            tiles_P, blocks_PK = chunk.tiles_P, chunk.blocks_PK
            k_PWD, v_PWD = _gather(k_PBD, blocks_PK), _gather(v_PBD, blocks_PK)
            dk_PDW = k_PWD.new_empty(k_PWD.shape[0], k_PWD.shape[2], k_PWD.shape[1])
            dv_PDW = torch.empty_like(dk_PDW)
            for place, span in enumerate(tiling.spans(chunk)):
                rows, columns = span.rows, span.columns
                # The first span sees all columns and overwrites, the others add.
                beta = min(place, 1)
                do_PMD = dout_PMD[:, rows].index_select(0, tiles_P)
                p_PMV = tiling.scores(chunk, span, q_PMD, k_PWD, scratch)
                p_PMV.sub_(lse_PM1[:, rows].index_select(0, tiles_P)).exp2_()
                dv_PDW[..., :columns].baddbmm_(do_PMD.transpose(1, 2), p_PMV, beta=beta)
                ds_PMV = _product(do_PMD, v_PWD[:, :columns], second_scratch, 1.0)
                ds_PMV.sub_(delta_PM1[:, rows].index_select(0, tiles_P)).mul_(p_PMV)
                dq_PMD[:, rows].index_copy_(0, tiles_P, torch.bmm(ds_PMV, k_PWD[:, :columns]))
                q_span_PDM = q_PMD[:, rows].index_select(0, tiles_P).transpose(1, 2)
                dk_PDW[..., :columns].baddbmm_(q_span_PDM, ds_PMV, beta=beta)
            _scatter_add(dk_PDB, blocks_PK, dk_PDW)
            _scatter_add(dv_PDB, blocks_PK, dv_PDW)
        dq_THD = tiling.query_rows(dq_PMD.mul_(ctx.softmax_scale)).to(q_THD.dtype)
        dk_TGD = tiling.key_rows(dk_PDB.mul_(ctx.softmax_scale)).to(k_TGD.dtype)
        dv_TGD = tiling.key_rows(dv_PDB).to(v_TGD.dtype)
        return dq_THD, dk_TGD, dv_TGD, None, None, None, None


class _Tiling:
    """How one call's tensors are cut into tiles."""

    def __init__(
        self, layout: PackedLayout, q_THD: Tensor, k_TGD: Tensor, softmax_scale: float
    ) -> None:
        self._layout = layout
        self._score_scale = softmax_scale * _LOG2_E
        self._kv_heads = k_TGD.shape[1]
        self._group = q_THD.shape[1] // self._kv_heads
        self._slots = layout.slots
        self._rows = self._group * self._slots
        self._device = q_THD.device
        self.dtype = torch.promote_types(q_THD.dtype, torch.float32)
        self.lowest = torch.finfo(self.dtype).min
        future = torch.full((self._slots, self._slots), -torch.inf, dtype=self.dtype)
        self._causal_B1B = future.triu_(1).to(self._device).unsqueeze(1)

    def query_tiles(self, x_THD: Tensor) -> Tensor:
        """[T, H, any] to [P, M, any], zeros in empty slots."""
        x = self._layout.to_blocks(x_THD.to(self.dtype))
        x = x.unflatten(2, (self._kv_heads, self._group)).permute(2, 0, 1, 3, 4)
        return x.reshape(-1, self._rows, x.shape[-1])

    def query_rows(self, x_PMD: Tensor) -> Tensor:
        """[P, M, any] to [T, H, any]."""
        x = x_PMD.view(self._kv_heads, -1, self._slots, self._group, x_PMD.shape[-1])
        return self._layout.from_blocks(x.permute(1, 2, 0, 3, 4).flatten(2, 3))

    def key_blocks(self, x_TGD: Tensor) -> Tensor:
        """[T, G, D] to [P, B, D], zeros in empty slots."""
        x = self._layout.to_blocks(x_TGD.to(self.dtype)).permute(2, 0, 1, 3)
        return x.reshape(-1, self._slots, x.shape[-1])

    def key_rows(self, x_PDB: Tensor) -> Tensor:
        """[P, D, B] to [T, G, D]."""
        x = x_PDB.unflatten(0, (self._kv_heads, -1))
        return self._layout.from_blocks(x.permute(1, 3, 0, 2))

    def scratch(self, width: int) -> Tensor:
        """Room for the scores of the largest span of lists up to ``width``."""
        rows = self._rows
        if self._device.type == "cpu":
            rows = min(rows, _LEAST_SPAN_ROWS + self._group)
        elements = max(self._chunk_elements(), rows * width * self._slots)
        return torch.empty(elements, dtype=self.dtype, device=self._device)

    def spans(self, chunk: _Chunk) -> Iterator[_Span]:
        for begin, end in chunk.spans:
            unseen = 0 if chunk.own_PB1B is None else self._slots - end
            yield _Span(
                rows=slice(begin * self._group, end * self._group),
                columns=chunk.blocks_PK.shape[1] * self._slots - unseen,
            )

    def scores(
        self, chunk: _Chunk, span: _Span, q_PMD: Tensor, k_PWD: Tensor, scratch: Tensor
    ) -> Tensor:
        """Masked scores [P, M, V] of a chunk's span, in ``scratch``."""
        q_PMD = q_PMD[:, span.rows].index_select(0, chunk.tiles_P)
        s_PMV = _product(q_PMD, k_PWD[:, : span.columns], scratch, self._score_scale)
        if chunk.own_PB1B is not None:
            begin, end = span.rows.start // self._group, span.rows.stop // self._group
            own_PBHB = s_PMV.unflatten(1, (-1, self._group))[..., -end:]
            own_PBHB.add_(chunk.own_PB1B[:, begin:end, :, :end])
        if chunk.padding_P1K1 is not None:
            s_PMV.unflatten(2, (-1, self._slots)).add_(chunk.padding_P1K1)
        return s_PMV

    def chunks(self, indices_NGK: Tensor, counts_NG: Tensor) -> Iterator[_Chunk]:
        """Cut all tiles into chunks.

        On the CPU the lists are sorted by length. Elsewhere the lengths stay unread, since reading
        them would stop the host: all lists are computed at full width, and what lies past their
        end is masked.
        """
        blocks = indices_NGK.shape[0]
        lists_PK = indices_NGK.transpose(0, 1).flatten(0, 1).long()
        head_P1 = torch.arange(self._kv_heads, device=self._device).repeat_interleave(
            blocks, output_size=self._kv_heads * blocks
        )[:, None]
        if self._device.type == "cpu":
            yield from self._chunks_by_length(lists_PK + head_P1 * blocks, counts_NG)
        else:
            yield from self._chunks_at_full_width(lists_PK, head_P1 * blocks)

    def _chunks_by_length(self, lists_PK: Tensor, counts_NG: Tensor) -> Iterator[_Chunk]:
        counts_P = counts_NG.t().flatten()
        own_P = (lists_PK[:, 0] == torch.arange(lists_PK.shape[0])) & (counts_P > 0)
        kind_P = 2 * counts_P + own_P
        by_kind_P = kind_P.argsort(stable=True)
        for kind, tiles in enumerate(by_kind_P.split(kind_P.bincount().tolist())):
            length = kind // 2
            if length == 0 or tiles.numel() == 0:
                continue
            spans = self._row_spans(length)
            for tiles_P in tiles.split(self._chunk_tiles(length)):
                yield _Chunk(
                    tiles_P=tiles_P,
                    blocks_PK=lists_PK[tiles_P, :length].flip(1),
                    own_PB1B=self._causal_B1B[None] if kind % 2 else None,
                    padding_P1K1=None,
                    spans=spans,
                )

    def _chunks_at_full_width(self, lists_PK: Tensor, first_P1: Tensor) -> Iterator[_Chunk]:
        tiles, width = lists_PK.shape
        tile_P = torch.arange(tiles, device=self._device)
        own_P111 = (lists_PK[:, 0] + first_P1[:, 0] == tile_P)[:, None, None, None]
        lists_PK = lists_PK.flip(1)
        padding_PK = torch.zeros_like(lists_PK, dtype=self.dtype).masked_fill_(
            lists_PK < 0, -torch.inf
        )
        blocks_PK = lists_PK.clamp(min=0) + first_P1
        for tiles_P in tile_P.split(self._chunk_tiles(width)):
            yield _Chunk(
                tiles_P=tiles_P,
                blocks_PK=blocks_PK[tiles_P],
                own_PB1B=torch.where(own_P111[tiles_P], self._causal_B1B, 0.0),
                padding_P1K1=padding_PK[tiles_P][:, None, :, None],
                spans=[(0, self._slots)],
            )

    def _row_spans(self, length: int) -> list[tuple[int, int]]:
        """Slots of a block in spans of at most a chunk's scores, the last span first."""
        fitting = self._chunk_elements() // (self._group * length * self._slots)
        slots = max(fitting, -(-_LEAST_SPAN_ROWS // self._group))
        begins = range(0, self._slots, slots)
        return [(begin, min(begin + slots, self._slots)) for begin in reversed(begins)]

    def _chunk_elements(self) -> int:
        return _CHUNK_ELEMENTS * (torch.get_num_threads() if self._device.type == "cpu" else 64)

    def _chunk_tiles(self, length: int) -> int:
        return max(1, self._chunk_elements() // (self._rows * length * self._slots))


def _product(a_PMD: Tensor, b_PWD: Tensor, scratch: Tensor, factor: float) -> Tensor:
    """factor * a . b^T, [P, M, W], in ``scratch``, whose former content is not read."""
    shape = (a_PMD.shape[0], a_PMD.shape[1], b_PWD.shape[1])
    out_PMW = scratch[: math.prod(shape)].view(shape)
    return out_PMW.baddbmm_(a_PMD, b_PWD.transpose(1, 2), beta=0, alpha=factor)


def _gather(x_PBD: Tensor, blocks_PK: Tensor) -> Tensor:
    """The listed blocks side by side: [P, W, D]."""
    tiles, length = blocks_PK.shape
    x = x_PBD.index_select(0, blocks_PK.flatten())
    return x.view(tiles, length * x_PBD.shape[1], x_PBD.shape[2])


def _scatter_add(x_PDB: Tensor, blocks_PK: Tensor, dx_PDW: Tensor) -> None:
    """Add each tile's columns to the blocks they were gathered from."""
    dx_PKDB = dx_PDW.unflatten(2, (blocks_PK.shape[1], -1)).transpose(1, 2)
    # index_add_ is an order of magnitude slower on a strided source.
    x_PDB.index_add_(0, blocks_PK.flatten(), dx_PKDB.flatten(0, 1).contiguous())
