# SPDX-License-Identifier: Apache-2.0
"""Attention of query blocks over gathered KV blocks: time and memory follow the budget.

A tile is one query block of one KV head, with the group's query heads stacked as its rows. Tiles
with lists of one length are computed together: gather their KV blocks, two products forward, five
backward. Lists are turned round, so that a query block's own block comes last and the causal mask
falls on the last columns of a tile; past blocks are always full, hence need none. Where lists are
padded, padding is a block of zeros of its own: a mask that adds -inf would not hold back the NaN of
another document. On the CPU a tile's rows are worked off in spans: scores stay in the cache, and a
span leaves out the own columns that none of its rows sees.

Scores are in units of log2, because exp2 is the fastest exponential torch has on a CPU.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, N blocks of the
row (of queries or of keys), K places of a list, B tokens of a query block, E of a KV block, A tiles
(query blocks of all KV heads; of keys KV blocks of all heads), I rows of a tile (B * H / G) or of
its span, W columns of a tile (list length * E), U those of a span.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.kernel import obstacle_of_lists, wide_dtype
from sparsebalance_megatron.attention.selection import Selection

_LOG2_E = math.log2(math.e)
_CHUNK_ELEMENTS = 1 << 18
"""Scores computed at once, per thread: 1 MiB in float32, about a core's second-level cache."""
_LEAST_SPAN_ROWS = 256
"""Rows of a span, at least: products of fewer are slow."""


@dataclass(frozen=True, kw_only=True)
class _Chunk:
    """Tiles computed together, and their KV blocks as positions in [G * N], the own one last.

    Added to scores: ``own_AB1E`` to those of the last block, None where no list holds the own
    block; ``padding_A1K1`` to [A, I, K, E], None where all lists are full. Rows are worked off in
    ``spans``: tokens of the block from and to.
    """

    tiles_A: Tensor
    blocks_AK: Tensor
    own_AB1E: Tensor | None
    padding_A1K1: Tensor | None
    spans: list[tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class _Span:
    """Rows of a chunk's tiles, and the columns that they can see, in all and of the own block."""

    rows: slice
    columns: int
    own_columns: int


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection by query block; see :class:`..kernel.Kernel`.

    Computes in float32, or float64 for float64 inputs. Deterministic on the CPU; on CUDA where
    ``torch.use_deterministic_algorithms`` makes ``index_add_`` so.
    """
    tiling = _Tiling(selection, q_THD, k_TGD, softmax_scale)
    q_AID = tiling.query_tiles(q_THD)
    k_AED, v_AED = tiling.key_blocks(k_TGD), tiling.key_blocks(v_TGD)
    out_AID = torch.zeros_like(q_AID)
    lse_AI1 = q_AID.new_full((*q_AID.shape[:2], 1), -torch.inf)
    scratch = tiling.scratch()
    for chunk in tiling.chunks():
        k_AWD, v_AWD = _gather(k_AED, chunk.blocks_AK), _gather(v_AED, chunk.blocks_AK)
        for span in tiling.spans(chunk):
            s_AIU = tiling.scores(chunk, span, q_AID, k_AWD, scratch)
            # The clamps touch only rows without any key: their maximum is -inf, their sum 0.
            peak_AI1 = s_AIU.amax(-1, keepdim=True).clamp_(min=tiling.lowest)
            sum_AI1 = s_AIU.sub_(peak_AI1).exp2_().sum(-1, keepdim=True)
            o_AID = torch.bmm(s_AIU, v_AWD[:, : span.columns]).div_(sum_AI1.clamp(min=1.0))
            out_AID[:, span.rows].index_copy_(0, chunk.tiles_A, o_AID)
            lse_AI1[:, span.rows].index_copy_(0, chunk.tiles_A, sum_AI1.log2_().add_(peak_AI1))
    out_THD = tiling.query_rows(out_AID).to(q_THD.dtype)
    lse_TH = tiling.query_rows(lse_AI1).squeeze(-1).div_(_LOG2_E)
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
    tiling = _Tiling(selection, q_THD, k_TGD, softmax_scale)
    q_AID = tiling.query_tiles(q_THD)
    k_AED, v_AED = tiling.key_blocks(k_TGD), tiling.key_blocks(v_TGD)
    dout_AID = tiling.query_tiles(dout_THD)
    delta_TH1 = (dout_THD.to(tiling.dtype) * out_THD).sum(-1, keepdim=True)
    delta_AI1 = tiling.query_tiles(delta_TH1)
    lse_AI1 = tiling.query_tiles(lse_TH.unsqueeze(-1)).mul(_LOG2_E).clamp_(min=tiling.lowest)
    dq_AID = torch.zeros_like(q_AID)
    # Products with the short side first are the faster ones, hence D before E.
    dk_ADE = torch.zeros_like(k_AED).transpose(1, 2).contiguous()
    dv_ADE = torch.zeros_like(dk_ADE)
    scratch, second_scratch = tiling.scratch(), tiling.scratch()
    for chunk in tiling.chunks():
        tiles_A, blocks_AK = chunk.tiles_A, chunk.blocks_AK
        k_AWD, v_AWD = _gather(k_AED, blocks_AK), _gather(v_AED, blocks_AK)
        dk_ADW = k_AWD.new_empty(k_AWD.shape[0], k_AWD.shape[2], k_AWD.shape[1])
        dv_ADW = torch.empty_like(dk_ADW)
        for place, span in enumerate(tiling.spans(chunk)):
            rows, columns = span.rows, span.columns
            # The first span sees all columns and overwrites, the others add.
            beta = min(place, 1)
            do_AID = dout_AID[:, rows].index_select(0, tiles_A)
            p_AIU = tiling.scores(chunk, span, q_AID, k_AWD, scratch)
            p_AIU.sub_(lse_AI1[:, rows].index_select(0, tiles_A)).exp2_()
            dv_ADW[..., :columns].baddbmm_(do_AID.transpose(1, 2), p_AIU, beta=beta)
            ds_AIU = _product(do_AID, v_AWD[:, :columns], second_scratch, 1.0)
            ds_AIU.sub_(delta_AI1[:, rows].index_select(0, tiles_A)).mul_(p_AIU)
            dq_AID[:, rows].index_copy_(0, tiles_A, torch.bmm(ds_AIU, k_AWD[:, :columns]))
            q_span_ADI = q_AID[:, rows].index_select(0, tiles_A).transpose(1, 2)
            dk_ADW[..., :columns].baddbmm_(q_span_ADI, ds_AIU, beta=beta)
        _scatter_add(dk_ADE, blocks_AK, dk_ADW)
        _scatter_add(dv_ADE, blocks_AK, dv_ADW)
    dq_THD = tiling.query_rows(dq_AID.mul_(softmax_scale)).to(q_THD.dtype)
    dk_TGD = tiling.key_rows(dk_ADE.mul_(softmax_scale)).to(k_TGD.dtype)
    dv_TGD = tiling.key_rows(dv_ADE).to(v_TGD.dtype)
    return dq_THD, dk_TGD, dv_TGD


def obstacle(q_THD: Tensor, selection: Selection) -> str | None:
    """Refuse selections by token."""
    return obstacle_of_lists(selection, by_token=False)


class _Tiling:
    """How one call's tensors are cut into tiles."""

    def __init__(
        self, selection: Selection, q_THD: Tensor, k_TGD: Tensor, softmax_scale: float
    ) -> None:
        self._selection = selection
        self._query_layout, self._kv_layout = selection.query_layout, selection.kv_layout
        self._score_scale = softmax_scale * _LOG2_E
        self._kv_heads = k_TGD.shape[1]
        self._group = q_THD.shape[1] // self._kv_heads
        self._query_tokens = self._query_layout.block_tokens
        self._key_tokens = self._kv_layout.block_tokens
        self._rows = self._group * self._query_tokens
        self._width = selection.indices_QCK.shape[2]
        self._device = q_THD.device
        self._by_length = _host_may_read(self._device)
        self.dtype = wide_dtype(q_THD.dtype)
        self.lowest = torch.finfo(self.dtype).min
        shape = self._query_tokens, self._key_tokens
        future_BE = torch.full(shape, -torch.inf, dtype=self.dtype, device=self._device)
        self._causal_B1E = future_BE.triu_(1).unsqueeze(1)

    def query_tiles(self, x_THD: Tensor) -> Tensor:
        """[T, H, any] to [A, I, any], zeros past short blocks."""
        x = self._query_layout.to_blocks(x_THD.to(self.dtype))
        x = x.unflatten(2, (self._kv_heads, self._group)).permute(2, 0, 1, 3, 4)
        return x.reshape(-1, self._rows, x.shape[-1])

    def query_rows(self, x_AID: Tensor) -> Tensor:
        """[A, I, any] to [T, H, any]."""
        x = x_AID.view(self._kv_heads, -1, self._query_tokens, self._group, x_AID.shape[-1])
        return self._query_layout.from_blocks(x.permute(1, 2, 0, 3, 4).flatten(2, 3))

    def key_blocks(self, x_TGD: Tensor) -> Tensor:
        """[T, G, D] to [A, E, D], zeros past short blocks; the padding comes last, if there is."""
        x = self._kv_layout.to_blocks(x_TGD.to(self.dtype)).permute(2, 0, 1, 3)
        x = x.reshape(-1, self._key_tokens, x.shape[-1])
        return x if self._by_length else pad(x, (0, 0, 0, 0, 0, 1))

    def key_rows(self, x_ADE: Tensor) -> Tensor:
        """[A, D, E] to [T, G, D]."""
        x_ADE = x_ADE if self._by_length else x_ADE[:-1]
        x = x_ADE.unflatten(0, (self._kv_heads, -1))
        return self._kv_layout.from_blocks(x.permute(1, 3, 0, 2))

    def scratch(self) -> Tensor:
        """Room for the scores of the largest span."""
        rows = self._rows
        if self._by_length:
            rows = min(rows, _LEAST_SPAN_ROWS + self._group)
        elements = max(self._chunk_elements(), rows * self._width * self._key_tokens)
        return torch.empty(elements, dtype=self.dtype, device=self._device)

    def spans(self, chunk: _Chunk) -> Iterator[_Span]:
        for begin, end in chunk.spans:
            # The block's last queries may see all of it, and its keys may be more than its queries.
            last = end == self._query_tokens
            own_columns = self._key_tokens if last else min(end, self._key_tokens)
            unseen = 0 if chunk.own_AB1E is None else self._key_tokens - own_columns
            yield _Span(
                rows=slice(begin * self._group, end * self._group),
                columns=chunk.blocks_AK.shape[1] * self._key_tokens - unseen,
                own_columns=own_columns,
            )

    def scores(
        self, chunk: _Chunk, span: _Span, q_AID: Tensor, k_AWD: Tensor, scratch: Tensor
    ) -> Tensor:
        """Masked scores [A, I, U] of a chunk's span, in ``scratch``."""
        q_AID = q_AID[:, span.rows].index_select(0, chunk.tiles_A)
        s_AIU = _product(q_AID, k_AWD[:, : span.columns], scratch, self._score_scale)
        if chunk.own_AB1E is not None:
            begin, end = span.rows.start // self._group, span.rows.stop // self._group
            own_ABHE = s_AIU.unflatten(1, (-1, self._group))[..., -span.own_columns :]
            own_ABHE.add_(chunk.own_AB1E[:, begin:end, :, : span.own_columns])
        if chunk.padding_A1K1 is not None:
            s_AIU.unflatten(2, (-1, self._key_tokens)).add_(chunk.padding_A1K1)
        return s_AIU

    def chunks(self) -> Iterator[_Chunk]:
        """Cut all tiles into chunks.

        On the CPU the lists are sorted by length. Elsewhere the lengths stay unread, since reading
        them would stop the host: all lists are computed at full width, and what lies past their
        end is masked.
        """
        indices_NGK, counts_NG = self._selection.indices_QCK, self._selection.counts_QC
        own_NG = (indices_NGK[:, :, 0] == self._selection.own_block_N[:, None]) & (counts_NG > 0)
        lists_AK = indices_NGK.transpose(0, 1).flatten(0, 1).long()
        counts_A, own_A = counts_NG.t().flatten(), own_NG.t().flatten()
        first_A1 = (
            torch.arange(self._kv_heads, device=self._device).repeat_interleave(
                indices_NGK.shape[0], output_size=lists_AK.shape[0]
            )[:, None]
            * self._kv_layout.blocks
        )
        if self._by_length:
            yield from self._chunks_by_length(lists_AK, counts_A, own_A, first_A1)
        else:
            yield from self._chunks_at_full_width(lists_AK, counts_A, own_A, first_A1)

    def _chunks_by_length(
        self, lists_AK: Tensor, counts_A: Tensor, own_A: Tensor, first_A1: Tensor
    ) -> Iterator[_Chunk]:
        lists_AK = lists_AK + first_A1
        kind_A = 2 * counts_A + own_A
        by_kind_A = kind_A.argsort(stable=True)
        for kind, tiles in enumerate(by_kind_A.split(kind_A.bincount().tolist())):
            length = kind // 2
            if length == 0 or tiles.numel() == 0:
                continue
            spans = self._row_spans(length)
            for tiles_A in tiles.split(self._chunk_tiles(length)):
                yield _Chunk(
                    tiles_A=tiles_A,
                    blocks_AK=lists_AK[tiles_A, :length].flip(1),
                    own_AB1E=self._causal_B1E[None] if kind % 2 else None,
                    padding_A1K1=None,
                    spans=spans,
                )

    def _chunks_at_full_width(
        self, lists_AK: Tensor, counts_A: Tensor, own_A: Tensor, first_A1: Tensor
    ) -> Iterator[_Chunk]:
        tiles, width = lists_AK.shape
        tile_A = torch.arange(tiles, device=self._device)
        past_end_AK = torch.arange(width, device=self._device) >= counts_A[:, None]
        padding = self._kv_heads * self._kv_layout.blocks
        blocks_AK = (lists_AK + first_A1).masked_fill_(past_end_AK, padding).flip(1)
        padding_AK = torch.zeros_like(blocks_AK, dtype=self.dtype).masked_fill_(
            past_end_AK.flip(1), -torch.inf
        )
        for tiles_A in tile_A.split(self._chunk_tiles(width)):
            yield _Chunk(
                tiles_A=tiles_A,
                blocks_AK=blocks_AK[tiles_A],
                own_AB1E=torch.where(own_A[tiles_A, None, None, None], self._causal_B1E, 0.0),
                padding_A1K1=padding_AK[tiles_A][:, None, :, None],
                spans=[(0, self._query_tokens)],
            )

    def _row_spans(self, length: int) -> list[tuple[int, int]]:
        """Tokens of a block in spans of at most a chunk's scores, the last span first."""
        fitting = self._chunk_elements() // (self._group * length * self._key_tokens)
        size = max(fitting, -(-_LEAST_SPAN_ROWS // self._group))
        begins = range(0, self._query_tokens, size)
        return [(begin, min(begin + size, self._query_tokens)) for begin in reversed(begins)]

    def _chunk_elements(self) -> int:
        return _CHUNK_ELEMENTS * (torch.get_num_threads() if self._device.type == "cpu" else 64)

    def _chunk_tiles(self, length: int) -> int:
        return max(1, self._chunk_elements() // (self._rows * length * self._key_tokens))


def _host_may_read(device: torch.device) -> bool:
    """Whether reading the lists' lengths stops nobody."""
    return device.type == "cpu"


def _product(a_AID: Tensor, b_AWD: Tensor, scratch: Tensor, factor: float) -> Tensor:
    """factor * a . b^T, [A, I, W], in ``scratch``, whose former content is not read."""
    shape = (a_AID.shape[0], a_AID.shape[1], b_AWD.shape[1])
    out_AIW = scratch[: math.prod(shape)].view(shape)
    return out_AIW.baddbmm_(a_AID, b_AWD.transpose(1, 2), beta=0, alpha=factor)


def _gather(x_AED: Tensor, blocks_AK: Tensor) -> Tensor:
    """The listed blocks side by side: [A, W, D]."""
    tiles, length = blocks_AK.shape
    x = x_AED.index_select(0, blocks_AK.flatten())
    return x.view(tiles, length * x_AED.shape[1], x_AED.shape[2])


def _scatter_add(x_ADE: Tensor, blocks_AK: Tensor, dx_ADW: Tensor) -> None:
    """Add each tile's columns to the blocks they were gathered from."""
    dx_AKDE = dx_ADW.unflatten(2, (blocks_AK.shape[1], -1)).transpose(1, 2)
    # index_add_ is an order of magnitude slower on a strided source.
    x_ADE.index_add_(0, blocks_AK.flatten(), dx_AKDE.flatten(0, 1).contiguous())
