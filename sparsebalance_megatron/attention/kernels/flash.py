# SPDX-License-Identifier: Apache-2.0
"""Attention over lists of blocks, composed of calls of torch's own flash kernels, on CUDA.

1. Own blocks: one causal call, a segment for each block of queries.
2. Past blocks, in rounds of some tokens and KV heads: the queries whose lists name a block are
   gathered behind one another, and attend to it. Readers of a block are cut into segments of at
   most ``_SEGMENT_ROWS`` rows, each with the block's keys. The host can bound their number, so
   nothing waits for the device, and a block that all queries read makes no launch wide.
3. A query's results, one from each place of its list, are summed in float32 by the softmax of
   their log-sum-exp.
4. The backward pass of every call takes the merged output and log-sum-exp, so gradients add up.

At most ``_ROWS_AT_ONCE`` rows are gathered at once, forward twice as many, so that memory does not
grow with the budget. All places of a list are in one round, so that nothing is carried to the next.
A block of queries that selects is taken as its tokens.

Shape legend: T tokens of the packed sequence (of queries or of keys), H query heads, G KV heads, D
head dim of keys, F of values, which here are padded to one D, N blocks, I places of all blocks, Q
rows and C heads that select, K places of a list. Of some KV heads: W their blocks (N for each head)
and one more, X lists (a token's side by side), E query heads of a list, Y what belongs to one of
them, side by side, Z rounds, U entries of a round and one that is never present, A segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from sparsebalance_megatron.attention.kernels import varlen
from sparsebalance_megatron.attention.kernels.contract import Saved
from sparsebalance_megatron.attention.kernels.varlen import Segments
from sparsebalance_megatron.attention.selection import Selection

_ROWS_AT_ONCE = 1 << 20
_ENTRIES_AT_ONCE = 1 << 24
"""Rows that are gathered for lists that are sorted at once."""
_SEGMENT_ROWS = 2048
_ABSENT_LSE = -1e30
"""Log-sum-exp of an entry that is not there: finite, so that a query without any has no NaN."""


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection; see :class:`.contract.Kernel`.

    The results of every call are rounded to the inputs' dtype before they are merged.
    """
    value_dim, selection = v_TGF.shape[2], _by_token(selection)
    q_THD, k_TGD, v_TGD = varlen.fitting(q_THD, k_TGD, v_TGF)
    own = _OwnBlocks(k_TGD, v_TGD, selection, softmax_scale)
    out_THD, lse_HT = varlen.attend(q_THD, own.k_TGD, own.v_TGD, own.segments)
    lse_TH = own.where_listed(lse_HT.T, -torch.inf)
    # The backward pass gathers twice as much for each row.
    for some in _past_blocks(q_THD, k_TGD, v_TGD, own, 2 * _ROWS_AT_ONCE):
        some.forward(q_THD, out_THD, lse_TH)
    return out_THD[..., :value_dim], torch.threshold_(lse_TH, _ABSENT_LSE / 2, -torch.inf)


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients; see :class:`.contract.Kernel`.

    Deterministic where ``torch.use_deterministic_algorithms`` asks for it. What the places of a
    list add to dq is rounded to the inputs' dtype; what rounds add to dk and dv is not.
    """
    head_dim, value_dim = saved.k_TGD.shape[2], saved.v_TGF.shape[2]
    inputs = dout_THF, saved.q_THD, saved.k_TGD, saved.v_TGF, saved.out_THF
    dout_THD, q_THD, k_TGD, v_TGD, out_THD = varlen.fitting(*inputs)
    own = _OwnBlocks(k_TGD, v_TGD, _by_token(saved.selection), saved.softmax_scale)
    own_lse_HT = own.where_listed(saved.lse_TH, torch.inf).T
    dq_THD, *dkv = varlen.attend_backward(
        *(dout_THD, q_THD, own.k_TGD, own.v_TGD, out_THD, own_lse_HT, own.segments)
    )
    gradients = dq_THD, *own.gradients_of_keys(*dkv)
    for some in _past_blocks(q_THD, k_TGD, v_TGD, own, _ROWS_AT_ONCE):
        some.backward((dout_THD, q_THD, out_THD), saved.lse_TH, gradients)
    dq_THD, dk_TGD, dv_TGD = gradients
    return dq_THD[..., :head_dim], dk_TGD[..., :head_dim], dv_TGD[..., :value_dim]


def obstacle(q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
    """Say what torch's kernels or their composition do not serve."""
    if selection.columns is not None:
        return 'reads blocks, and this selection has columns besides: use "triton" or "blocks"'
    blocks = max(selection.query_layout.blocks, selection.kv_layout.blocks)
    most = _most_blocks(q_THD.shape[1] // selection.counts_QC.shape[1])
    if blocks > most:
        return f'serves {most} blocks, not {blocks}: use larger blocks, or "auto"'
    return varlen.obstacle(q_THD.device, q_THD.dtype, max(q_THD.shape[2], v_TGF.shape[2]))


def _most_blocks(group: int) -> int:
    """Blocks that a round may have, beside which there are segments for cuts between readers."""
    return varlen.MOST_SEGMENTS - 2 * _ROWS_AT_ONCE // (group * _segment_entries(group))


def _segment_entries(group: int) -> int:
    """Most entries of a segment, each of which is one row for each query head of a list."""
    return max(1, _SEGMENT_ROWS // group)


def _by_token(selection: Selection) -> Selection:
    if selection.by_token:
        return selection
    block_T = selection.query_layout.block_T
    return replace(
        selection,
        indices_QCK=selection.indices_QCK.index_select(0, block_T),
        counts_QC=selection.counts_QC.index_select(0, block_T),
        by_token=True,
    )


class _OwnBlocks:
    """The keys of the queries' own tokens, and a segment for each block of queries."""

    def __init__(
        self, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, softmax_scale: float
    ) -> None:
        layout, kv_layout = selection.query_layout, selection.kv_layout
        own_T = selection.own_block_N[layout.block_T]
        place_K = torch.arange(selection.indices_QCK.shape[2], device=own_T.device)
        past_end_TCK = place_K >= selection.counts_QC[..., None]
        own_TCK = selection.indices_QCK == own_T[:, None, None]
        self._unlisted_TC = own_TCK[..., 0] <= past_end_TCK[..., 0]
        self.no_past_TCK = past_end_TCK.logical_or_(own_TCK)
        self.selection = selection
        self.k_TGD, self.v_TGD = self._whole = k_TGD, v_TGD
        self._token_T: Tensor | None = None
        if layout is not kv_layout:
            moved_T = kv_layout.start_N[own_T.clamp(min=0)] - layout.start_N[layout.block_T]
            token_T = torch.arange(layout.tokens, device=own_T.device) + moved_T
            self._token_T = token_T.clamp_(max=kv_layout.tokens - 1)
            # A block that lies elsewhere is not read; what stands in for it may be another's NaN.
            self._elsewhere_T11 = (own_T < 0)[:, None, None]
            self.k_TGD, self.v_TGD = (
                x.index_select(0, self._token_T).masked_fill_(self._elsewhere_T11, 0.0)
                for x in self._whole
            )
        self.segments = Segments(
            queries_A1=layout.bounds_N1,
            keys_A1=layout.bounds_N1,
            longest_queries=layout.block_tokens,
            longest_keys=layout.block_tokens,
            causal=True,
            softmax_scale=softmax_scale,
        )

    def where_listed(self, lse_TH: Tensor, otherwise: float) -> Tensor:
        """A contiguous copy, with another number where a query does not read its own block."""
        lse_TCE = lse_TH.unflatten(1, (self._unlisted_TC.shape[1], -1))
        return lse_TCE.masked_fill(self._unlisted_TC[..., None], otherwise).flatten(1)

    def gradients_of_keys(self, *gradients: Tensor) -> Iterator[Tensor]:
        """dk_TGD and dv_TGD of the sequence of keys."""
        for whole, dx in zip(self._whole, gradients, strict=True):
            if self._token_T is None:
                yield dx
            else:
                dx = dx.masked_fill(self._elsewhere_T11, 0.0)
                yield torch.zeros_like(whole).index_add_(0, self._token_T, dx)


@dataclass(frozen=True, kw_only=True)
class _Entries:
    """The entries of all rounds, each round's ordered by the block that they name.

    Attributes:
        list_ZU: the list of an entry, among those of all tokens; any where there is no entry.
        row_ZXK: where an entry of a list came to lie in U; the last where there is none.
        block_ZA: the block of a segment, in W; any where the segment is empty.
        bounds_ZA1, keys_A1: int32 bounds of segments, in rows and in keys.
    """

    list_ZU: Tensor
    row_ZXK: Tensor
    block_ZA: Tensor
    bounds_ZA1: Tensor
    keys_A1: Tensor


def _past_blocks(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, own: _OwnBlocks, rows_at_once: int
) -> Iterator[_PastBlocks]:
    """All KV heads: as many at once as the bounds allow."""
    count, layout, lists_TCK = k_TGD.shape[1], own.selection.kv_layout, own.selection.indices_QCK
    blocks, (tokens, query_heads, head_dim) = layout.blocks, q_THD.shape
    most = min(
        _ENTRIES_AT_ONCE * count // (tokens * query_heads * lists_TCK.shape[2]),
        _ROWS_AT_ONCE * count // (tokens * query_heads),
        _most_blocks(query_heads // lists_TCK.shape[1]) // blocks,
    )
    at_once = min(max(1, most), count)
    # Blocks lie behind one another, those of a KV head together, and one more that nobody reads.
    # Nor is what lies behind a short block's end: that is its document's last block.
    keys_WY = k_TGD.new_empty(count * blocks + 1, layout.block_tokens * 2 * head_dim)
    keys_GI2D = keys_WY[:-1].view(count, blocks * layout.block_tokens, 2, -1)
    keys_GI2D.index_copy_(1, layout.place_T, torch.stack((k_TGD, v_TGD), 2).transpose(0, 1))
    for first in range(0, count, at_once):
        heads = slice(first, min(first + at_once, count))
        some_WY = keys_WY[heads.start * blocks : heads.stop * blocks + 1]
        yield _PastBlocks(heads, query_heads // count, some_WY, own, rows_at_once)


class _PastBlocks:
    """Some KV heads, the past blocks that their lists name, and who reads them."""

    def __init__(
        self, kv_heads: slice, queries: int, keys_WY: Tensor, own: _OwnBlocks, rows_at_once: int
    ) -> None:
        tokens, all_lists, self._places = own.selection.indices_QCK.shape
        heads, lists = kv_heads.stop - kv_heads.start, all_lists // own.k_TGD.shape[1]
        self._heads, self._count, self._per_token = heads, heads * queries, heads * lists
        self._group, self._kv_heads = queries // lists, kv_heads
        self._lists, self._query_heads = (
            slice(kv_heads.start * each, kv_heads.stop * each) for each in (lists, queries)
        )
        self._own, self._layout, self._keys_WY = own, own.selection.kv_layout, keys_WY
        most = max(1, rows_at_once // (self._count * self._places))
        self._tokens = size = -(-tokens // -(-tokens // most))
        self._rounds = [slice(x, min(x + size, tokens)) for x in range(0, tokens, size)]
        rows = self._count * (size * (self._places + 1) + 1)
        longest = max(rows, self._per_token * tokens) + len(keys_WY)
        self._number = torch.arange(longest, dtype=torch.int32, device=keys_WY.device)

    def forward(self, q_THD: Tensor, out_THD: Tensor, lse_TH: Tensor) -> None:
        """Merge what these heads read into the output and LSE of own blocks."""
        entries, q_XY = self._sorted_entries(), self._by_list(q_THD)
        row_ZXEK1 = self._rows_with_own(entries.row_ZXK)
        absent_1HD = torch.zeros_like(out_THD[:1, self._query_heads], dtype=lse_TH.dtype)
        absent_1H = torch.full_like(lse_TH[:1, self._query_heads], _ABSENT_LSE)
        first_X = self._firsts(row_ZXEK1[0])
        for each, tokens in enumerate(self._rounds):
            part, lse = varlen.attend(
                self._rows(q_XY.index_select(0, entries.list_ZU[each])), *self._keys(entries, each)
            )
            out, own_lse = (x[tokens, self._query_heads] for x in (out_THD, lse_TH))
            # Rows behind the last segment hold whatever was in memory; no list names them.
            lse = torch.cat((self._by_token(lse[0]), absent_1H, own_lse)).flatten()
            row_XEK1 = row_ZXEK1[each, : len(own_lse) * self._per_token]
            lse_XEK1 = lse.index_select(0, row_XEK1.flatten()).view(row_XEK1.shape)
            weights = lse_XEK1.softmax(-1).flatten()
            torch.logsumexp(lse_XEK1.view(*own_lse.shape, -1), 2, out=own_lse)
            part = torch.cat((self._by_token(part[:, 0]), absent_1HD, out)).flatten(0, 1)
            out.copy_(_sums(part, row_XEK1, first_X, weights, None).view(out.shape))
            del part

    def backward(
        self, given: Sequence[Tensor], lse_TH: Tensor, gradients: Sequence[Tensor]
    ) -> None:
        """Add to dq_THD, dk_TGD and dv_TGD; ``given`` is dout_THD, q_THD and out_THD."""
        entries, (dq_THD, dk_TGD, dv_TGD) = self._sorted_entries(), gradients
        given_3THD = torch.stack([x[:, self._query_heads] for x in given])
        given_3XY = given_3THD.view(3, len(lse_TH) * self._per_token, -1)
        lse_ZUE = self._by_list(lse_TH)[entries.list_ZU]
        first_X, absent = self._firsts(entries.row_ZXK[0]), entries.list_ZU.shape[1] - 1
        sum_WY = torch.zeros_like(self._keys_WY, dtype=lse_TH.dtype)
        for each, tokens in enumerate(self._rounds):
            dout, q, out = map(self._rows, given_3XY.index_select(1, entries.list_ZU[each]))
            k, v, segments = self._keys(entries, each)
            part, *dkv = varlen.attend_backward(
                *(dout, q, k, v, out, lse_ZUE[each].view(1, -1), segments)
            )
            dq = dq_THD[tokens, self._query_heads]
            row_XK = entries.row_ZXK[each, : len(dq) * self._per_token]
            part = part.reshape(absent + 1, -1)
            dq.add_(_sums(part, row_XK, first_X, None, absent).view(dq.shape))
            wide = torch.empty_like(k.expand(-1, 2, -1), dtype=sum_WY.dtype)
            part_AY = torch.cat(dkv, 1, out=wide).view(-1, sum_WY.shape[1])
            sum_WY.index_add_(0, entries.block_ZA[each], part_AY)
            del dout, q, out, part
        sum_GI2D = sum_WY[:-1].view(self._heads, -1, 2, dq_THD.shape[2])
        sum_GT2D = sum_GI2D.index_select(1, self._layout.place_T)
        for place, whole in enumerate((dk_TGD, dv_TGD)):
            whole[:, self._kv_heads].add_(sum_GT2D[:, :, place].transpose(0, 1))

    def _by_list(self, x_TH: Tensor) -> Tensor:
        """These heads of [T, H, ...] as [X, any]: X of all tokens, a list's heads side by side."""
        x = x_TH[:, self._query_heads]
        return x.reshape(len(x) * self._per_token, -1)

    def _rows(self, x_UY: Tensor) -> Tensor:
        """The query heads of every entry's list below one another."""
        return x_UY.view(len(x_UY) * self._group, 1, -1)

    def _by_token(self, x: Tensor) -> Tensor:
        """Rows of a round, but the last entry's, with as many side by side as a token has heads."""
        return x[: len(x) - self._group].unflatten(0, (-1, self._count))

    def _firsts(self, row: Tensor) -> Tensor:
        """Where each sum's rows begin among all."""
        return self._number[: row.numel() : row.shape[-1]].contiguous()

    def _keys(self, entries: _Entries, each: int) -> tuple[Tensor, Tensor, Segments]:
        """Keys and values of a round's segments, and the segments."""
        chosen_AY = self._keys_WY.index_select(0, entries.block_ZA[each])
        kv_2D = chosen_AY.view(len(chosen_AY) * self._layout.block_tokens, 2, -1)
        segments = Segments(
            queries_A1=entries.bounds_ZA1[each],
            keys_A1=entries.keys_A1,
            longest_queries=_segment_entries(self._group) * self._group,
            longest_keys=self._layout.block_tokens,
            causal=False,
            softmax_scale=self._own.segments.softmax_scale,
        )
        return kv_2D[:, :1], kv_2D[:, 1:], segments

    def _rows_with_own(self, row_ZXK: Tensor) -> Tensor:
        """[Z, X, E, K + 1]: the same for single rows of a list, and behind them its own block's.

        Own blocks' rows lie behind those of entries and one for every head that has none.
        """
        group, lists, places = self._group, *row_ZXK.shape[1:]
        row_ZXEK = row_ZXK[:, :, None]
        if group > 1:
            row_ZXEK = row_ZXEK * group + self._number[:group, None]
        first = lists * places * group + self._count
        row_ZXEK1 = pad(row_ZXEK, (0, 1))
        row_ZXEK1[..., places] = self._number[first : first + lists * group].view(lists, group)
        return row_ZXEK1

    def _sorted_entries(self) -> _Entries:
        """Sort the entries of every round.

        A segment ends where a block's readers do, and after every ``_segment_entries``.
        Those that are left of the bounded number are empty.
        """
        block_ZU, none = self._named_blocks(), len(self._keys_WY) - 1
        (rounds, count), number, size = block_ZU.shape, self._number, _segment_entries(self._group)
        sorted_ZU, entry_ZU = block_ZU.sort(stable=True)
        number_ZW1 = number[: none + 1].expand(rounds, -1).contiguous()
        bound_ZW1 = torch.searchsorted(sorted_ZU, number_ZW1)
        cuts = number[size : count - 1 : size].minimum(bound_ZW1[:, -1:])
        bound_ZA1 = torch.cat((bound_ZW1, cuts), 1).sort().values
        block_ZA = sorted_ZU.gather(1, bound_ZA1[:, :-1])
        bounds_ZA1 = torch.empty_like(bound_ZA1, dtype=torch.int32)
        row_ZU = torch.empty_like(block_ZU)
        row_ZU.scatter_(1, entry_ZU, number[:count].expand(rounds, -1))
        row_ZU.masked_fill_(block_ZU == none, count - 1)
        lists = self._tokens * self._per_token
        list_ZU = entry_ZU.floor_divide_(self._places)
        list_ZU += number[: rounds * lists : lists, None]
        return _Entries(
            list_ZU=list_ZU.clamp_(max=self._rounds[-1].stop * self._per_token - 1),
            row_ZXK=row_ZU[:, :-1].unflatten(1, (-1, self._places)),
            block_ZA=block_ZA,
            bounds_ZA1=torch.mul(bound_ZA1, self._group, out=bounds_ZA1),
            keys_A1=number[: block_ZA.shape[1] + 1] * self._layout.block_tokens,
        )

    def _named_blocks(self) -> Tensor:
        """int32 [Z, U]: the block in W that an entry of a round names, W where there is none."""
        selection, none = self._own.selection, len(self._keys_WY) - 1
        lists_TCK = selection.indices_QCK[:, self._lists]
        absent_TCK = self._own.no_past_TCK[:, self._lists]
        first_G11 = self._number[: none : self._layout.blocks, None, None]
        block_TGCK = lists_TCK.unflatten(1, (self._heads, -1)) + first_G11
        block_TY = block_TGCK.flatten(1).masked_fill_(absent_TCK.flatten(1), none)
        if short := len(self._rounds) * self._tokens - len(block_TY):
            block_TY = pad(block_TY, (0, 0, 0, short), value=none)
        return pad(block_TY.view(len(self._rounds), -1), (0, 1), value=none)


def _sums(
    table: Tensor, rows: Tensor, firsts: Tensor, weights: Tensor | None, absent: int | None
) -> Tensor:
    """Weighted sums over the last dimension of ``rows`` of the table's rows, but for ``absent``."""
    how: dict[str, Any] = {"mode": "sum", "per_sample_weights": weights, "padding_idx": absent}
    return embedding_bag(rows.flatten(), table, firsts[: rows.shape[:-1].numel()], **how)
