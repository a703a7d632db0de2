# SPDX-License-Identifier: Apache-2.0
"""Vertical-slash selection: probe queries choose columns of keys and diagonals of blocks.

After MTraining (arXiv:2510.18830) and MInference (arXiv:2407.02490), whose attention patterns are
vertical lines (keys that many queries read) and slashes (distances at which many queries read).
What differs from theirs, and why, is in research/vertical_slash.md.

A key's column mass is the softmax mass that probes put on it. A block diagonal's mass is what a
later query block will put on one past block if every diagonal of the probes keeps its mass: a
probe's mass at distance d falls into block distances d // B and d // B + 1, in the shares in which
the B queries of a block look there.

Shape legend: B tokens of a block, X places of a list of columns, U probes of a block, E query heads
of a KV head, J consecutive blocks of a document, Y keys from a document's first, W blocks from its
first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.device import copied_to, exact_product, undisturbed
from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout
from sparsebalance_megatron.attention.select.ranking import (
    Ranking,
    RankingSelector,
    best_outside,
    column_blocks,
    read_blocks,
)
from sparsebalance_megatron.attention.select.summaries import check_ranked

SCORES_AT_ONCE = 1 << 21
"""Scores of probes computed at once: 8 MiB in float32."""
_CUDA_FACTOR = 64
"""Larger on a GPU, where an operation on less takes as long; up to 1.6 GiB live at once."""
_EXACT_BUDGETS = 32
"""Coverage is exact up to this budget; from there on at budgets a quarter apart, with straight
lines in between."""
_PROBE_TOKENS = 16
"""Queries that probe in every block, evenly spaced, its last one among them."""
_SINK_TOKENS = 30
"""A document's first tokens, which come first among the columns and count for no diagonal; at most
a quarter of a block."""
_ALWAYS_READ = 2
"""The own block and the block before it, which is the local window."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ProbesAndKeys:
    """The sequence's keys, as they are, and the queries that probe in every block."""

    keys_TGD: Tensor
    probes_NUHD: Tensor

    def parts(self, layout: PackedLayout) -> list[Tensor]:
        keys_NBGD = layout.to_blocks(self.keys_TGD)
        # A sequence of short documents alone has shorter blocks.
        missing = layout.block_size - layout.block_tokens
        return [pad(keys_NBGD, (0, 0, 0, 0, 0, missing)), self.probes_NUHD]

    def joined(self, parts: Sequence[Tensor], layout: PackedLayout) -> "ProbesAndKeys":
        keys_NBGD, probes_NUHD = parts
        keys_TGD = layout.from_blocks(keys_NBGD[:, : layout.block_tokens])
        return ProbesAndKeys(keys_TGD=keys_TGD, probes_NUHD=probes_NUHD)


class VerticalSlash(RankingSelector):
    """Blocks on the best diagonals, and the best columns outside of them.

    The query heads of a KV head share one choice: each has its own softmax, and their mean decides.
    A budget is spent as :mod:`.ranking` says. Coverage is the share of their softmax mass that
    probes of every query block find in what that block reads. What a block reads is chosen by
    probes of the block before it.
    """

    by_token = False

    @torch.no_grad()
    def summaries(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> ProbesAndKeys:
        return ProbesAndKeys(keys_TGD=k_TGD, probes_NUHD=q_THD[_probes_of(layout)])

    @torch.no_grad()
    def rank(
        self,
        q_THD: Tensor,
        summaries: ProbesAndKeys,
        layouts: LayoutPair,
        *,
        softmax_scale: float,
        max_budget: int,
        observe: bool,
    ) -> Ranking:
        """Rank what each block may read; see :class:`..select.Selector`.

        Equal mass: the lower number wins. Mass that is not a number counts as none. Scores and
        sums are float32 or wider, inside ``torch.autocast`` too.
        """
        check_ranked(q_THD, summaries.keys_TGD, layouts.kv_layout.tokens, layouts, max_budget)
        with undisturbed(q_THD.device):
            lists = _RowLists(q_THD, summaries, layouts, softmax_scale, max_budget, observe)
            return lists.ranking()


VERTICAL_SLASH = VerticalSlash()


def _probes_of(layout: PackedLayout) -> Tensor:
    """int64 [N, U]: the tokens that probe in every block; in short blocks some do twice."""
    probes = min(_PROBE_TOKENS, layout.block_size)
    rank_U1 = torch.arange(1, probes + 1, device=layout.start_N.device)
    offset_NU = (rank_U1 * layout.length_N[:, None] // probes - 1).clamp_(min=0)
    return layout.start_N[:, None] + offset_NU


class _RowLists:
    """The lists of queries, written document by document of the keys' sequence."""

    def __init__(
        self,
        q_THD: Tensor,
        summaries: ProbesAndKeys,
        layouts: LayoutPair,
        softmax_scale: float,
        max_budget: int,
        observe: bool,
    ) -> None:
        layout = layouts.kv_layout
        self._layouts, self._layout, self._k_TGD = layouts, layout, summaries.keys_TGD
        heads = self._k_TGD.shape[1]
        self._query_heads = q_THD.shape[1]
        self._probes_NUGED = summaries.probes_NUHD.unflatten(2, (heads, -1))
        self._softmax_scale, self._observe = softmax_scale, observe
        self._size = layout.block_size
        self._sinks = min(_SINK_TOKENS, self._size // 4)
        self._probe_NU = _probes_of(layout)
        probes = self._probe_NU.shape[1]
        rank_U1 = torch.arange(1, probes + 1, device=q_THD.device)
        self._offset_U = rank_U1 * self._size // probes - 1
        self._first_block_S = layout.grid.first_block_S.tolist()
        self._runs_of_document = _runs(layouts)
        places = min(max_budget, layout.max_blocks)
        columns = self._size * max(0, places - _ALWAYS_READ)
        rows = layouts.query_layout.blocks, heads
        self._blocks_NGK = torch.full((*rows, places), -1, dtype=torch.int32, device=q_THD.device)
        self._columns_NGX = torch.full((*rows, columns), -1, dtype=torch.int32, device=q_THD.device)
        self._elements_at_once = SCORES_AT_ONCE * (_CUDA_FACTOR if q_THD.is_cuda else 1)
        self._budgets = observed_budgets(layout.max_blocks)
        self._budget_K = copied_to(torch.tensor(self._budgets), q_THD.device)
        shape = layout.documents, len(self._budgets)
        self._covered_SK = torch.zeros(shape, dtype=torch.float64, device=q_THD.device)

    def ranking(self) -> Ranking:
        for document in range(self._layout.documents):
            self._rank_document(document)
        return Ranking(
            layouts=self._layouts,
            by_token=False,
            indices_QCK=self._blocks_NGK,
            columns_NGX=self._columns_NGX,
            mass_SK=self._mass_of_budgets() if self._observe else None,
        )

    def _rank_document(self, document: int) -> None:
        first_token, end_token = self._layout.cu_seqlens[document : document + 2]
        k_YGD = self._k_TGD[first_token:end_token]
        first_block = self._first_block_S[document]
        for some, row in self._chunks(document):
            k_some = k_YGD[: some.stop * self._size]
            blocks_JGW, columns_JGY, seen_JGY = self._masses(document, some, k_some)
            block_order_JGW = _falling_blocks(blocks_JGW, some.start)
            column_order_JGY, listed_JGY = self._falling_columns(columns_JGY, some.start)
            rows = slice(row, row + some.stop - some.start)
            blocks_JGK = self._blocks_NGK[rows, :, : some.stop]
            number_JGK = block_order_JGW[..., : blocks_JGK.shape[2]] + first_block
            past_end_JGK = number_JGK > self._layouts.own_block_N[rows, None, None]
            blocks_JGK.copy_(number_JGK.masked_fill_(past_end_JGK, -1))
            columns_JGX = self._columns_NGX[rows, :, : len(k_some)]
            token_JGX = column_order_JGY[..., : columns_JGX.shape[2]] + first_token
            unlisted_JGX = ~listed_JGY[..., : columns_JGX.shape[2]]
            columns_JGX.copy_(token_JGX.masked_fill_(unlisted_JGX, -1))
            if seen_JGY is not None:
                order = block_order_JGW, column_order_JGY, listed_JGY
                self._observe_blocks(document, some, seen_JGY, *order)

    def _chunks(self, document: int) -> Iterator[tuple[slice, int]]:
        """Blocks of a document whose probes score few enough keys; and where their lists begin."""
        blocks = self._layout.blocks_per_document[document]
        probes = self._offset_U.shape[0] * self._query_heads
        at_once = max(1, self._elements_at_once // (probes * blocks * self._size))
        for run, row in self._runs_of_document[document]:
            for first in range(run.start, run.stop, at_once):
                some = slice(first, min(first + at_once, run.stop))
                yield some, row + first - run.start

    def _masses(
        self, document: int, some: slice, k_YGD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Mass by which the blocks and the columns of some query blocks are ranked, and the mass
        that these blocks' own probes see, if it is observed."""
        before = min(some.start, 1)
        # The last block of some chooses for the next ones, and need not probe for its own sake.
        probing = slice(some.start - before, some.stop if self._observe else some.stop - 1)
        first = self._first_block_S[document]
        blocks = slice(first + probing.start, first + probing.stop)
        probed_JGY, following_JGW = probed_mass(
            self._probes_NUGED[blocks],
            self._probe_NU[blocks] - self._layout.cu_seqlens[document],
            k_YGD,
            block_size=self._size,
            offset_U=self._offset_U,
            sink_tokens=self._sinks,
            softmax_scale=self._softmax_scale,
        )
        # A document's first block has none before it, and reads itself whatever it asks.
        new = some.stop - some.start - 1 + before
        pads = (0, 0, 0, 0, 1 - before, 0)
        seen_JGY = probed_JGY[before:] if self._observe else None
        return pad(following_JGW[:new], pads), pad(probed_JGY[:new], pads), seen_JGY

    def _falling_columns(self, mass_JGY: Tensor, first: int) -> tuple[Tensor, Tensor]:
        """int64 [J, G, Y]: all keys, those that may be columns first and by falling mass; and
        which of these may."""
        key_Y = torch.arange(mass_JGY.shape[2], device=mass_JGY.device)
        own_J1 = torch.arange(first, first + len(mass_JGY), device=key_Y.device)[:, None]
        visible_J1Y = (key_Y // self._size <= own_J1 - _ALWAYS_READ)[:, None]
        mass_JGY = mass_JGY.nan_to_num(0.0).masked_fill(key_Y < self._sinks, torch.inf)
        mass_JGY = mass_JGY.masked_fill(~visible_J1Y, -torch.inf)
        order_JGY = mass_JGY.sort(dim=-1, descending=True, stable=True).indices
        return order_JGY, visible_J1Y.expand_as(order_JGY).gather(2, order_JGY)

    def _observe_blocks(
        self,
        document: int,
        some: slice,
        seen_JGY: Tensor,
        block_order_JGW: Tensor,
        column_order_JGY: Tensor,
        listed_JGY: Tensor,
    ) -> None:
        """Add what budgets read of the mass that some blocks' probes see."""
        size, device = self._size, seen_JGY.device
        whole_JGW = pad(seen_JGY, (0, -seen_JGY.shape[2] % size)).unflatten(2, (-1, size)).sum(-1)
        single_JGY = seen_JGY.gather(2, column_order_JGY)
        block_JGY = column_order_JGY // size
        visible_J = torch.arange(some.start + 1, some.stop + 1, device=device)
        first = self._first_block_S[document]
        tokens_J = self._layout.length_N[first + some.start : first + some.stop]
        at_once = max(1, self._elements_at_once // single_JGY.numel())
        for begin in range(0, len(self._budgets), at_once):
            places = slice(begin, begin + at_once)
            budget_K1 = self._budget_K[places, None]
            columns_KJ = (visible_J > budget_K1) * column_blocks(budget_K1)
            blocks_KJ = visible_J.minimum(budget_K1) - columns_KJ
            read_KJGW = read_blocks(block_order_JGW, blocks_KJ[..., None], some.stop)
            taken_KJGY = best_outside(
                block_JGY, listed_JGY, read_KJGW, (columns_KJ * size)[..., None, None]
            )
            covered_KJ = (whole_JGW * read_KJGW).sum((2, 3), dtype=torch.float64)
            covered_KJ += (single_JGY * taken_KJGY).sum((2, 3), dtype=torch.float64)
            self._covered_SK[document, places] += (covered_KJ * tokens_J).sum(1)

    def _mass_of_budgets(self) -> Tensor:
        """float64 [S, K], K up to the most blocks of a document: what every budget adds."""
        every = np.arange(1, self._layout.max_blocks + 1)
        covered_SK = self._covered_SK
        if len(self._budgets) < len(every):
            between = [np.interp(every, self._budgets, row) for row in np.eye(len(self._budgets))]
            between_KK = torch.from_numpy(np.stack(between))
            covered_SK = covered_SK @ copied_to(between_KK, covered_SK.device)
        return covered_SK.diff(dim=1, prepend=torch.zeros_like(covered_SK[:, :1]))


def _runs(layouts: LayoutPair) -> list[list[tuple[slice, int]]]:
    """Runs of blocks that follow one another in both sequences, by document and counted from its
    first block; and the place of a run's first block in the queries' sequence."""
    own_N = np.asarray(layouts.own_blocks)
    document_N = layouts.kv_layout.grid.document_N[own_N]
    breaks = np.flatnonzero((np.diff(own_N) != 1) | (np.diff(document_N) != 0)) + 1
    bounds = [0, *breaks.tolist(), len(own_N)]
    runs: list[list[tuple[slice, int]]] = [[] for _ in range(layouts.kv_layout.documents)]
    for row, end in pairwise(bounds):
        document = document_N[row]
        begin = int(layouts.kv_layout.grid.index_N[own_N[row]])
        runs[document].append((slice(begin, begin + end - row), row))
    return runs


def observed_budgets(max_blocks: int) -> tuple[int, ...]:
    """Budgets whose coverage is exact: up to 32, then steps of a quarter, and ``max_blocks``."""
    budgets = list(range(1, min(max_blocks, _EXACT_BUDGETS) + 1))
    while budgets[-1] < max_blocks:
        budgets.append(min(max_blocks, budgets[-1] + budgets[-1] // 4))
    return tuple(budgets)


def _falling_blocks(mass_JGW: Tensor, first: int) -> Tensor:
    """int64 [J, G, W]: own block, the one before it, then the others by falling mass, and in the
    end those that lie ahead."""
    number_W = torch.arange(mass_JGW.shape[2], device=mass_JGW.device)
    own_J1 = torch.arange(first, first + len(mass_JGW), device=number_W.device)[:, None]
    back_J1W = (own_J1 - number_W)[:, None]
    mass_JGW = mass_JGW.nan_to_num(0.0).masked_fill(back_J1W < 0, -torch.inf)
    # Softmax mass does not exceed 1 by more than rounding.
    mass_JGW = torch.where(back_J1W == 0, 4.0, torch.where(back_J1W == 1, 2.0, mass_JGW))
    return mass_JGW.sort(dim=-1, descending=True, stable=True).indices


def probed_mass(
    q_JUGED: Tensor,
    position_JU: Tensor,
    k_YGD: Tensor,
    *,
    block_size: int,
    offset_U: Tensor,
    sink_tokens: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """Attend from probes, at ``position_JU`` among the keys, to all keys up to themselves.

    ``offset_U`` are their places in a whole block, which diagonals start from.

    Returns:
        float32, each the mean of a block's probes and query heads: columns_JGY, their mass on every
        key; and blocks_JGW, the mass that the block right after theirs is expected to put on every
        block.
    """
    blocks, probes, _, group, _ = q_JUGED.shape
    q_GXD = q_JUGED.float().permute(2, 0, 1, 3, 4).flatten(1, 3)
    k_GDY = k_YGD.float().permute(1, 2, 0)
    scores = exact_product(q_GXD, k_GDY).unflatten(1, (blocks, probes, group))
    keys = k_YGD.shape[0]
    later_JU1Y = torch.arange(keys, device=k_YGD.device) > position_JU[..., None, None]
    scores.mul_(softmax_scale).masked_fill_(later_JU1Y, -torch.inf)
    mass_GJUY = scores.softmax(-1).mean(3)
    columns_JGY = mass_GJUY.mean(2).transpose(0, 1)
    mass_GJUY[..., :sink_tokens] = 0.0
    padded = pad(mass_GJUY, (0, -keys % block_size)).unflatten(3, (-1, block_size))
    mass_GJWX = padded.transpose(2, 3).flatten(3)
    shares_X3 = _shares(offset_U, block_size).flatten(0, 1)
    # The mass on a block goes to it, to the next one and to the one after that.
    shifted_GJW3 = exact_product(mass_GJWX, shares_X3) / probes
    width = shifted_GJW3.shape[2]
    moved = [pad(x_GJW, (n, 0))[..., :width] for n, x_GJW in enumerate(shifted_GJW3.unbind(-1))]
    return columns_JGY, torch.stack(moved).sum(0).transpose(0, 1)


def _shares(offset_U: Tensor, block_size: int) -> Tensor:
    """float32 [U, B, 3]: how a probe's mass on a block's place is shared between shifts 0 to 2."""
    ahead_UB = offset_U[:, None] - torch.arange(block_size, device=offset_U.device)
    least, most = ahead_UB.clamp(min=0), ahead_UB.clamp(max=0).neg()
    shares_UB3 = torch.stack((least, block_size - ahead_UB.abs(), most), -1)
    return shares_UB3.float() / block_size
