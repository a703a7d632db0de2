# SPDX-License-Identifier: Apache-2.0
"""Attention over lists of blocks, composed of calls of torch's own flash kernels, on CUDA.

1. Own blocks: one causal call, a segment for each block of queries.
2. Past blocks: for some KV heads at once, the queries whose lists name a block are gathered behind
   one another, and attend to it. Readers of a block are cut into segments of at most
   ``_SEGMENT_ROWS`` rows, each with the block's keys. The host can bound their number, so nothing
   waits for the device, and a block that all queries read makes no launch wide.
3. A query's results, one from each place of its list, are merged in float32 by their log-sum-exp.
4. The backward pass of every call takes the merged output and log-sum-exp, so gradients add up.

At most ``_ROWS_AT_ONCE`` rows are gathered at once, so that memory does not grow with the budget.
A block of queries that selects is taken as its tokens.

Shape legend: T tokens of the packed sequence (of queries or of keys), H query heads, G KV heads, D
head dim of keys, F of values, N blocks, B tokens of a block, Q rows and C heads that select, K
places of a list. Of some KV heads: W their blocks (N for each head), X their lists (a token's side
by side), E query heads of a list, J places of all lists taken at once, Z such rounds, U entries of
a round, A segments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag, pad

from sparsebalance_megatron.attention.kernels import varlen
from sparsebalance_megatron.attention.kernels.contract import Saved, wide_dtype
from sparsebalance_megatron.attention.kernels.gathered import own_listed_QC
from sparsebalance_megatron.attention.kernels.varlen import Segments
from sparsebalance_megatron.attention.selection import Selection

_ROWS_AT_ONCE = 1 << 20
_ENTRIES_AT_ONCE = 1 << 22
"""Entries of lists that are sorted at once."""
_SEGMENT_ROWS = 2048


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection; see :class:`.contract.Kernel`.

    The results of every call are rounded to the inputs' dtype before they are merged.
    """
    selection = _by_token(selection)
    own = _OwnBlocks(k_TGD, v_TGF, selection, softmax_scale)
    out_THF, lse_HT = varlen.attend(q_THD, own.k_TGD, own.v_TGF, own.segments)
    lse_TH = lse_HT.T.masked_fill(_own_absent(selection, q_THD), -torch.inf)
    for some in _past_blocks(q_THD, k_TGD, v_TGF, selection, softmax_scale):
        out_XEF = some.by_list(out_THF).to(lse_TH.dtype)
        lse_XE = some.by_list(lse_TH)
        for entries in some.rounds():
            q_UED = some.gathered(q_THD, entries)
            parts_UEF, lse_HU = varlen.attend(q_UED.flatten(0, 1)[:, None], *some.keys(entries))
            # Behind the last segment lies whatever was in memory.
            lse_UE = torch.where(entries.present_U1, lse_HU.view(-1, some.group), -torch.inf)
            lse_XEJ = lse_UE.flatten()[entries.row_XEJ]
            total_XE = torch.logaddexp(lse_XE, lse_XEJ.logsumexp(2))
            # A query that has read nothing yet has -inf, and -inf less -inf is NaN.
            finite_XE1 = total_XE.clamp(min=torch.finfo(total_XE.dtype).min)[..., None]
            weight_XEJ = lse_XEJ.sub_(finite_XE1).exp_()
            share_XE1 = (lse_XE[..., None] - finite_XE1).exp_()
            sum_XEF = some.sums(parts_UEF, entries, weight_XEJ)
            out_XEF, lse_XE = sum_XEF.addcmul_(out_XEF, share_XE1), total_XE
        out_THF[:, some.query_heads] = some.by_token(out_XEF)
        lse_TH[:, some.query_heads] = some.by_token(lse_XE)
    return out_THF, lse_TH


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients; see :class:`.contract.Kernel`.

    Deterministic where ``torch.use_deterministic_algorithms`` asks for it.
    """
    selection, out_THF, q_THD = _by_token(saved.selection), saved.out_THF, saved.q_THD
    inputs = saved.k_TGD, saved.v_TGF, selection, saved.softmax_scale
    own = _OwnBlocks(*inputs)
    own_lse_TH = saved.lse_TH.masked_fill(_own_absent(selection, q_THD), torch.inf)
    dq_THD, *dkv = varlen.attend_backward(
        *(dout_THF, q_THD, own.k_TGD, own.v_TGF, out_THF, own_lse_TH.T, own.segments)
    )
    dk_TGD, dv_TGF = own.gradients_of_keys(*dkv)
    for some in _past_blocks(q_THD, *inputs):
        dq_XED = some.by_list(dq_THD).to(saved.lse_TH.dtype, copy=True)
        lse_XE = some.by_list(saved.lse_TH)
        for entries in some.rounds():
            dout, q, out = (
                some.gathered(x, entries).flatten(0, 1)[:, None] for x in (dout_THF, q_THD, out_THF)
            )
            lse_HU = lse_XE[entries.list_U].view(1, -1)
            k, v, segments = some.keys(entries)
            parts_UED, *dkv = varlen.attend_backward(dout, q, k, v, out, lse_HU, segments)
            dq_XED += some.sums(parts_UED, entries, None)
            some.add_to_keys(entries, dkv)
        dq_THD[:, some.query_heads] = some.by_token(dq_XED)
        for whole_TGD, sum_TGD in zip((dk_TGD, dv_TGF), some.gradients_of_keys(), strict=True):
            whole_TGD[:, some.kv_heads] += sum_TGD
    return dq_THD, dk_TGD, dv_TGF


def obstacle(q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
    """Say what torch's kernels or their composition do not serve."""
    if selection.columns is not None:
        return 'reads blocks, and this selection has columns besides: use "triton" or "blocks"'
    blocks = max(selection.query_layout.blocks, selection.kv_layout.blocks)
    most = varlen.MOST_SEGMENTS - _segments_beside_blocks(q_THD.shape[0] * q_THD.shape[1])
    if blocks > most:
        return f'serves {most} blocks, not {blocks}: use larger blocks, or "auto"'
    return varlen.obstacle(q_THD.device, q_THD.dtype, max(q_THD.shape[2], v_TGF.shape[2]))


def _segments_beside_blocks(rows: int) -> int:
    """Bound on segments of a round beside one for each block, if a place has so many rows."""
    return 2 * max(rows, _ROWS_AT_ONCE) // _SEGMENT_ROWS


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


def _own_absent(selection: Selection, q_THD: Tensor) -> Tensor:
    """Queries that do not read their own block, bool [T, H]."""
    listed_TC1 = own_listed_QC(selection)[..., None]
    return ~listed_TC1.expand(-1, -1, q_THD.shape[1] // listed_TC1.shape[1]).flatten(1)


class _OwnBlocks:
    """The keys of the queries' own tokens, and a segment for each block of queries."""

    def __init__(
        self, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, softmax_scale: float
    ) -> None:
        layout, kv_layout = selection.query_layout, selection.kv_layout
        self.k_TGD, self.v_TGF = self._whole = k_TGD, v_TGF
        self._token_T: Tensor | None = None
        if layout is not kv_layout:
            own_N, block_T = selection.own_block_N, layout.block_T
            moved_N = kv_layout.start_N[own_N.clamp(min=0)] - layout.start_N
            token_T = torch.arange(layout.tokens, device=block_T.device) + moved_N[block_T]
            self._token_T = token_T.clamp_(max=kv_layout.tokens - 1)
            # A block that lies elsewhere is not read; what stands in for it may be another's NaN.
            self._elsewhere_T11 = (own_N < 0)[block_T, None, None]
            self.k_TGD, self.v_TGF = (
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

    def gradients_of_keys(self, *gradients: Tensor) -> Iterator[Tensor]:
        """dk_TGD and dv_TGF of the sequence of keys."""
        for whole, dx in zip(self._whole, gradients, strict=True):
            if self._token_T is None:
                yield dx
            else:
                dx = dx.masked_fill(self._elsewhere_T11, 0.0)
                yield torch.zeros_like(whole).index_add_(0, self._token_T, dx)


@dataclass(frozen=True, kw_only=True)
class _Round:
    """Entries of some places of all lists, ordered by the block that they name.

    Attributes:
        list_U, list_of_all_U: the list of an entry, among these heads' and among all.
        row_XEJ: the row, in U * E, of an entry and a query head.
        present_U1: False where a list has no such entry; these come last.
        block_A, head_A: the block of a segment and its KV head, of these; any where it is empty.
        bounds_A1: int32 bounds of segments, in rows.
    """

    list_U: Tensor
    list_of_all_U: Tensor
    row_XEJ: Tensor
    present_U1: Tensor
    block_A: Tensor
    head_A: Tensor
    bounds_A1: Tensor


def _past_blocks(
    q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, softmax_scale: float
) -> Iterator[_PastBlocks]:
    """All KV heads: as many at once, and as many places of their lists, as the bounds allow."""
    count, (tokens, lists, width) = k_TGD.shape[1], selection.indices_QCK.shape
    rows, entries = tokens * q_THD.shape[1] // count, tokens * lists // count * width
    most = min(
        _ROWS_AT_ONCE // rows,
        _ENTRIES_AT_ONCE // entries,
        (varlen.MOST_SEGMENTS - _segments_beside_blocks(rows)) // selection.kv_layout.blocks,
    )
    at_once = min(max(1, most), count)
    places = min(max(1, _ROWS_AT_ONCE // (rows * at_once)), width)
    keys = [selection.kv_layout.to_blocks(x) for x in (k_TGD, v_TGF)]
    for first in range(0, count, at_once):
        heads = slice(first, min(first + at_once, count))
        yield _PastBlocks(heads, places, q_THD.shape[1], keys, selection, softmax_scale)


class _PastBlocks:
    """Some KV heads, the past blocks that their lists name, and who reads them."""

    def __init__(
        self,
        kv_heads: slice,
        places: int,
        all_query_heads: int,
        keys: Sequence[Tensor],
        selection: Selection,
        softmax_scale: float,
    ) -> None:
        all_heads, all_lists = keys[0].shape[2], selection.counts_QC.shape[1]
        self.kv_heads = kv_heads
        self.group = all_query_heads // all_lists
        self._heads, self._lists_per_head = kv_heads.stop - kv_heads.start, all_lists // all_heads
        self._lists = slice(*(x * self._lists_per_head for x in (kv_heads.start, kv_heads.stop)))
        self._count, self._all_lists = self._heads * self._lists_per_head, all_lists
        self.query_heads = slice(self._lists.start * self.group, self._lists.stop * self.group)
        self._places, self._softmax_scale = places, softmax_scale
        self._selection, self._layout, self._keys = selection, selection.kv_layout, keys
        self._sums: list[Tensor] = []

    def by_list(self, x_TH: Tensor) -> Tensor:
        """These heads of [T, H, ...] as [X, E, ...]."""
        return x_TH[:, self.query_heads].unflatten(1, (-1, self.group)).flatten(0, 1)

    def by_token(self, x_XE: Tensor) -> Tensor:
        """The inverse of :meth:`by_list`."""
        return x_XE.unflatten(0, (-1, self._count)).flatten(1, 2)

    def gathered(self, x_THD: Tensor, entries: _Round) -> Tensor:
        """The query heads of every entry's list, [U, E, D]."""
        rows = x_THD.reshape(-1, self.group, x_THD.shape[2])
        return rows.index_select(0, entries.list_of_all_U)

    def keys(self, entries: _Round) -> tuple[Tensor, Tensor, Segments]:
        """Keys and values of the segments, and the segments."""
        block_A, head_A = entries.block_A, entries.head_A + self.kv_heads.start
        k, v = (x_NBGD[block_A, :, head_A].flatten(0, 1)[:, None] for x_NBGD in self._keys)
        tokens, device = self._layout.block_tokens, k.device
        bounds_A1 = torch.arange(0, len(k) + 1, tokens, device=device, dtype=torch.int32)
        segments = Segments(
            queries_A1=entries.bounds_A1,
            keys_A1=bounds_A1,
            longest_queries=self._segment_entries * self.group,
            longest_keys=tokens,
            causal=False,
            softmax_scale=self._softmax_scale,
        )
        return k, v, segments

    def sums(self, parts_U1D: Tensor, entries: _Round, weight_XEJ: Tensor | None) -> Tensor:
        """Weighted sums of what the entries of a list gave, [X, E, D], in float32 or wider."""
        lists, group, places = entries.row_XEJ.shape
        parts_UED = parts_U1D.view(-1, group, parts_U1D.shape[2])
        nothing_1 = torch.zeros(1, dtype=wide_dtype(parts_UED.dtype), device=parts_UED.device)
        parts_UED = torch.where(entries.present_U1[..., None], parts_UED, nothing_1)
        weights = None if weight_XEJ is None else weight_XEJ.view(-1, places)
        rows = entries.row_XEJ.view(-1, places)
        summed = embedding_bag(
            rows, parts_UED.flatten(0, 1), mode="sum", per_sample_weights=weights
        )
        return summed.view(lists, group, -1)

    def add_to_keys(self, entries: _Round, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of the segments' keys and values."""
        read_A11 = (entries.bounds_A1.diff() > 0)[:, None, None]
        tokens, blocks = self._layout.block_tokens, self._layout.blocks
        if not self._sums:
            self._sums = [
                torch.zeros(
                    *(self._heads * blocks, tokens, dx.shape[2]),
                    dtype=wide_dtype(dx.dtype),
                    device=dx.device,
                )
                for dx in gradients
            ]
        number_A = entries.head_A * blocks + entries.block_A
        for sum_WBD, dx in zip(self._sums, gradients, strict=True):
            part_ABD = torch.where(read_A11, dx.view(-1, *sum_WBD.shape[1:]), sum_WBD.new_zeros(1))
            sum_WBD.index_add_(0, number_A, part_ABD)

    def gradients_of_keys(self) -> Iterator[Tensor]:
        """What was added, [T, G, D]."""
        for sum_WBD in self._sums:
            sum_NBGD = sum_WBD.unflatten(0, (self._heads, -1)).movedim(0, 2)
            yield self._layout.from_blocks(sum_NBGD)

    def rounds(self) -> Iterator[_Round]:
        """Sort the entries of some places of all lists, for all such rounds at once.

        A segment begins where a block's readers do, or ``_segment_entries`` behind the segment
        before. Those that are left of the bounded number are empty.
        """
        block_ZU, blocks = self._named_blocks(), self._heads * self._layout.blocks
        (rounds, count), device = block_ZU.shape, block_ZU.device
        size = self._segment_entries
        number_W1 = torch.arange(blocks + 1, device=device, dtype=block_ZU.dtype)
        sorted_ZU, entry_ZU = block_ZU.sort(stable=True)
        bound_ZW1 = torch.searchsorted(sorted_ZU, number_W1.expand(rounds, -1).contiguous())
        segments_ZW = (bound_ZW1.diff() + (size - 1)) // size
        first_ZW1 = pad(segments_ZW.cumsum(1), (1, 0))
        number_A1 = torch.arange(count // size + min(blocks, count) + 1, device=device)
        # Past the last segment this is the number behind the last block, whose bound is the end.
        block_ZA1 = torch.searchsorted(
            first_ZW1[:, 1:].contiguous(), number_A1.expand(rounds, -1).contiguous(), right=True
        )
        begin_ZA1 = (bound_ZW1 - first_ZW1 * size).gather(1, block_ZA1) + number_A1 * size
        end_Z1 = bound_ZW1[:, -1:]
        bounds_ZA1 = (begin_ZA1.minimum(end_Z1) * self.group).int()
        block_ZA = block_ZA1[:, :-1].clamp(max=blocks - 1)
        head_ZA = block_ZA // self._layout.blocks
        block_ZA -= head_ZA * self._layout.blocks
        number_U = torch.arange(count, device=device)
        present_ZU = number_U < end_Z1
        row_ZU = torch.empty_like(entry_ZU)
        row_ZU.scatter_(1, entry_ZU, (number_U * self.group).expand(rounds, -1))
        row_ZX1J = row_ZU.view(rounds, -1, 1, self._places)
        number_E1 = torch.arange(self.group, device=device)[:, None]
        list_ZU = list_of_all_ZU = entry_ZU.floor_divide_(self._places)
        if self._count < self._all_lists:
            list_of_all_ZU = list_ZU // self._count * (self._all_lists - self._count)
            list_of_all_ZU += list_ZU + self._lists.start
        for each in range(rounds):
            yield _Round(
                list_U=list_ZU[each],
                list_of_all_U=list_of_all_ZU[each],
                row_XEJ=row_ZX1J[each] + number_E1 if self.group > 1 else row_ZX1J[each],
                present_U1=present_ZU[each, :, None],
                block_A=block_ZA[each],
                head_A=head_ZA[each],
                bounds_A1=bounds_ZA1[each],
            )

    @property
    def _segment_entries(self) -> int:
        return max(1, _SEGMENT_ROWS // self.group)

    def _named_blocks(self) -> Tensor:
        """int32 [Z, U]: the block in W that an entry of a round names, W where there is none."""
        selection, blocks = self._selection, self._layout.blocks
        lists_TCK = selection.indices_QCK[:, self._lists]
        place_K = torch.arange(lists_TCK.shape[2], device=lists_TCK.device)
        absent_TCK = place_K >= selection.counts_QC[:, self._lists, None]
        own_T11 = selection.own_block_N[selection.query_layout.block_T, None, None]
        absent_TCK |= lists_TCK == own_T11
        number_C = torch.arange(self._count, device=lists_TCK.device, dtype=torch.int32)
        lists_TCK = lists_TCK + (number_C // self._lists_per_head * blocks)[:, None]
        lists_TCK = lists_TCK.masked_fill_(absent_TCK, self._heads * blocks)
        short = -lists_TCK.shape[2] % self._places
        if short:
            lists_TCK = pad(lists_TCK, (0, short), value=self._heads * blocks)
        by_round = lists_TCK.flatten(0, 1).unflatten(1, (-1, self._places)).movedim(1, 0)
        return by_round.flatten(1).contiguous()
