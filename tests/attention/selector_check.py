# SPDX-License-Identifier: Apache-2.0
"""A check of selectors: ours, and those of other packages (docs/EXTENDING.md)."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import Selector, rank_sequence
from sparsebalance_megatron.attention.selection import Selection

_DOCUMENT_BLOCKS = (1.4, 8.7, 2.3, 4.0)
"""Lengths of the documents, in blocks: short last blocks, and one that is full."""
_BUDGETS = (4, 3, 5, 1)
_ROUNDINGS = 16 * 2.0**-23


class SelectorError(ValueError):
    """A selector breaks a rule that attention and training rely on."""


def check_selector(
    selector: Selector[Any, Any],
    *,
    block_size: int = 16,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seeds: Sequence[int] = (0, 1),
) -> None:
    """Check a selector on random sequences of four documents.

    - lists: the own block first, then earlier blocks of the same document, none twice, no more than
      the budget; coverage rises to 1.
    - determinism: the same bits each time, whether or not coverage is observed, without gradients.
    - documents: what one holds changes neither lists nor coverage of another.
    - causality: what tokens hold changes no list of a token before them. A list that the tokens of
      a block share counts as that of the first of them.

    Raises:
        SelectorError: naming the rule, and the row, head or token that breaks it.
    """
    lengths = [max(1, int(blocks * block_size)) for blocks in _DOCUMENT_BLOCKS]
    boundaries = [0, *itertools.accumulate(lengths)]
    layout = packed_layout(boundaries, block_size, "cpu")
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        q_THD, k_TGD = (
            2.0 * torch.randn(boundaries[-1], heads, head_dim, generator=generator)
            for heads in (query_heads, kv_heads)
        )
        trial = _Trial(selector=selector, layout=layout, q_THD=q_THD, k_TGD=k_TGD)
        found = trial.run()
        check_lists(found, layout, by_token=selector.by_token)
        _check_coverage(found.curves_SK, layout)
        _check_determinism(trial, found)
        _check_documents(trial, found)
        _check_causality(trial, found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Lists and curves that a selector gave; lists on the host, -1 past their ends."""

    selection: Selection
    curves_SK: Tensor = field(default_factory=lambda: torch.empty(0))

    @cached_property
    def blocks_QCK(self) -> Tensor:
        return _cut(self.selection.indices_QCK, self.selection.counts_QC)

    @cached_property
    def columns_QCK(self) -> Tensor:
        """Empty lists where there are no columns."""
        columns = self.selection.columns
        if columns is None:
            return self.blocks_QCK[..., :0]
        return _cut(columns.tokens_NGK, columns.counts_NG)

    def same_lists(self, other: "Found") -> bool:
        return self.blocks_QCK.equal(other.blocks_QCK) and self.columns_QCK.equal(other.columns_QCK)

    def first_moved(self, other: "Found", among_T: Tensor) -> int | None:
        """The first token of a row whose lists differ, of rows whose first token is among some."""
        differs_Q = (self.blocks_QCK != other.blocks_QCK).flatten(1).any(1)
        differs_Q |= (self.columns_QCK != other.columns_QCK).flatten(1).any(1)
        starts = self.selection.query_layout.bounds_on_host
        for row in differs_Q.nonzero()[:, 0].tolist():
            token = row if self.selection.by_token else int(starts[row])
            if among_T[token]:
                return token
        return None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    selector: Selector[Any, Any]
    layout: PackedLayout
    q_THD: Tensor
    k_TGD: Tensor

    def run(self, *, observe: bool = True) -> Found:
        """Lists at the budgets above, and coverage where it is observed."""
        ranking = rank_sequence(
            self.selector,
            *(self.q_THD, self.k_TGD, self.layout),
            softmax_scale=self.q_THD.shape[-1] ** -0.5,
            max_budget=max(_BUDGETS),
            observe=observe,
        )
        budgets_S = torch.tensor(_BUDGETS, device=self.q_THD.device)
        selection = self.selector.select(ranking, budgets_S)
        curves_SK = self.selector.coverage(ranking).cpu() if observe else torch.empty(0)
        return Found(selection=selection, curves_SK=curves_SK)

    def changed(self, begin: int, end: int) -> Found:
        """The run with other queries and keys at some tokens."""
        q_THD, k_TGD = self.q_THD.clone(), self.k_TGD.clone()
        for x in (q_THD, k_TGD):
            x[begin:end] = 5.0 - 30.0 * x[begin:end]
        return replace(self, q_THD=q_THD, k_TGD=k_TGD).run()


def _cut(lists_QCK: Tensor, counts_QC: Tensor) -> Tensor:
    past_end_QCK = torch.arange(lists_QCK.shape[2]) >= counts_QC.cpu()[..., None]
    return lists_QCK.cpu().masked_fill(past_end_QCK, -1)


def check_lists(
    found: Found, layout: PackedLayout, *, by_token: bool, budgets: Sequence[int] = _BUDGETS
) -> None:
    """Refuse lists that break the first rule of :func:`check_selector`."""
    selection = found.selection
    if selection.by_token != by_token:
        raise SelectorError(f"lists: by_token is {by_token}, the selection says otherwise")
    own_Q = (layout.block_T if by_token else layout.number_N).tolist()
    if len(found.blocks_QCK) != len(own_Q):
        raise SelectorError(f"lists: {len(found.blocks_QCK)} rows, expected {len(own_Q)}")
    document_N, index_N, block_T = (
        x.tolist() for x in (layout.document_N, layout.index_N, layout.block_T)
    )
    heads = range(found.blocks_QCK.shape[1])
    for (row, own), head in itertools.product(enumerate(own_Q), heads):
        blocks = [block for block in found.blocks_QCK[row, head].tolist() if block >= 0]
        columns = [token for token in found.columns_QCK[row, head].tolist() if token >= 0]
        document = document_N[own]
        allowed = min(budgets[document], index_N[own] + 1)
        fits = (
            len(blocks) == int(selection.counts_QC[row, head]) <= allowed
            and blocks[:1] == [own]
            and len(set(blocks)) == len(blocks)
            and all(block <= own and document_N[block] == document for block in blocks)
        )
        if not fits:
            raise SelectorError(
                f"lists: row {row}, head {head} reads blocks {blocks}: must begin with its own "
                f"block {own}, and hold at most {allowed} of it and those before it in its "
                "document, none twice"
            )
        past = {b for b in range(own) if document_N[b] == document}.difference(blocks)
        if len(set(columns)) < len(columns) or not past.issuperset(block_T[t] for t in columns):
            raise SelectorError(
                f"columns: row {row}, head {head} reads tokens {columns}: must lie in past blocks "
                "of its document that are not read whole, none twice"
            )


def _check_coverage(curves_SK: Tensor, layout: PackedLayout) -> None:
    expected = (layout.documents, layout.max_blocks)
    if tuple(curves_SK.shape) != expected or curves_SK.dtype != torch.float32:
        raise SelectorError(
            f"coverage: {curves_SK.dtype} {tuple(curves_SK.shape)}, expected float32 {expected}"
        )
    falls = (curves_SK.diff(dim=1) < -_ROUNDINGS).any()
    outside = ((curves_SK < 0.0) | (curves_SK > 1.0 + _ROUNDINGS)).any()
    whole = (curves_SK[:, -1] - 1.0).abs().max() <= _ROUNDINGS
    if falls or outside or not whole:
        raise SelectorError(
            "coverage: curves must rise from at least 0 to 1 at a document's blocks"
        )


def _check_determinism(trial: _Trial, expected: Found) -> None:
    q_THD, k_TGD = (x.clone().requires_grad_() for x in (trial.q_THD, trial.k_TGD))
    again = replace(trial, q_THD=q_THD, k_TGD=k_TGD).run()
    if not again.same_lists(expected) or not again.curves_SK.equal(expected.curves_SK):
        raise SelectorError("determinism: the same sequence gave other lists or coverage")
    if not trial.run(observe=False).same_lists(expected):
        raise SelectorError("determinism: lists depend on whether coverage is observed")
    if again.curves_SK.requires_grad or again.selection.indices_QCK.requires_grad:
        raise SelectorError("determinism: results carry a gradient; use torch.no_grad")


def _check_documents(trial: _Trial, expected: Found) -> None:
    for document, (begin, end) in enumerate(itertools.pairwise(trial.layout.cu_seqlens)):
        found = trial.changed(begin, end)
        token_T = torch.arange(trial.layout.tokens)
        moved = found.first_moved(expected, (token_T < begin) | (token_T >= end))
        others = torch.arange(trial.layout.documents) != document
        if moved is not None or not found.curves_SK[others].equal(expected.curves_SK[others]):
            raise SelectorError(
                f"documents: what document {document} holds changes lists or coverage of another"
                + ("" if moved is None else f", that of token {moved}")
            )


def _check_causality(trial: _Trial, expected: Found) -> None:
    size = trial.layout.block_size
    begin, end = trial.layout.cu_seqlens[1:3]
    # Inside, at the beginning and at the end of blocks of the longest document.
    for place in (1, size // 2, size, size + 1, 3 * size - 1, 5 * size + 3):
        token = begin + place
        found = trial.changed(token, end)
        moved = found.first_moved(expected, torch.arange(trial.layout.tokens) < token)
        if moved is not None:
            raise SelectorError(
                f"causality: what token {token} and those after it hold changes the list of token "
                f"{moved}, which comes before them"
            )
