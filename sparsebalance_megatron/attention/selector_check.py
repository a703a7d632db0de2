# SPDX-License-Identifier: Apache-2.0
"""What a selector must hold to, as a check for the tests of whoever writes one.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, S documents,
K budgets, Q rows that select, C heads that select.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import Selector, rank_row
from sparsebalance_megatron.attention.selection import Selection

_BLOCKS = (1.4, 8.7, 2.3, 4.0)
"""Lengths of the documents, in blocks: short last blocks, and one that is full."""
_BUDGETS = (3, 2, 4, 1)
_ROUNDINGS = 16 * 2.0**-23


class SelectorError(ValueError):
    """A selector breaks a rule that attention and training rely on."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Row:
    layout: PackedLayout
    q_THD: Tensor
    k_TGD: Tensor

    def changed(self, begin: int, end: int) -> _Row:
        """Other queries and keys at some tokens."""
        q_THD, k_TGD = self.q_THD.clone(), self.k_TGD.clone()
        for x in (q_THD, k_TGD):
            x[begin:end] = 5.0 - 30.0 * x[begin:end]
        return replace(self, q_THD=q_THD, k_TGD=k_TGD)


def check_selector(
    selector: Selector[Any, Any],
    *,
    block_size: int = 16,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    seeds: Sequence[int] = (0, 1),
    device: torch.device | str = "cpu",
) -> None:
    """Check a selector on random rows of four documents.

    - lists: the own block first, then earlier blocks of the same document, none twice, no more than
      the budget; coverage rises to 1.
    - determinism: the same bits each time, whether or not coverage is observed, without gradients.
    - documents: what one holds changes neither lists nor coverage of another.
    - causality: what tokens hold changes no list of a token before them. A list that the tokens of
      a block share counts as that of the first of them.

    Raises:
        SelectorError: naming the rule, and the row, head or token that breaks it.
    """
    lengths = [max(1, int(blocks * block_size)) for blocks in _BLOCKS]
    boundaries = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    layout = packed_layout(boundaries, block_size, device)
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        q_THD, k_TGD = (
            (2.0 * torch.randn(boundaries[-1], heads, head_dim, generator=generator)).to(device)
            for heads in (query_heads, kv_heads)
        )
        row = _Row(layout=layout, q_THD=q_THD, k_TGD=k_TGD)
        _check_lists(selector, row)
        _check_determinism(selector, row)
        _check_documents(selector, row)
        _check_causality(selector, row)


def _selected(
    selector: Selector[Any, Any], row: _Row, *, observe: bool = True
) -> tuple[Selection, Tensor | None]:
    """Lists at the budgets above, and coverage [S, K] where it is observed."""
    ranking = rank_row(
        selector,
        *(row.q_THD, row.k_TGD, row.layout),
        softmax_scale=row.q_THD.shape[-1] ** -0.5,
        max_budget=max(_BUDGETS),
        observe=observe,
    )
    budgets_S = torch.tensor(_BUDGETS, device=row.q_THD.device)
    return selector.select(ranking, budgets_S), selector.coverage(ranking) if observe else None


def _lists(selection: Selection) -> Tensor:
    """[Q, C, K] on the host, -1 past every list's end."""
    lists_QCK, counts_QC = selection.indices_QCK.cpu(), selection.counts_QC.cpu()
    past_QCK = torch.arange(lists_QCK.shape[2]) >= counts_QC[..., None]
    return lists_QCK.masked_fill(past_QCK, -1)


def _everything(selection: Selection) -> Tensor:
    """Lists of blocks, with single tokens that are read besides behind them."""
    lists_QCK = _lists(selection)
    if selection.columns is None:
        return lists_QCK
    columns_NGK, counts_NG = (
        x.cpu() for x in (selection.columns.tokens_NGK, selection.columns.counts_NG)
    )
    past_NGK = torch.arange(columns_NGK.shape[2]) >= counts_NG[..., None]
    columns_NGK = columns_NGK.masked_fill(past_NGK, -1).to(lists_QCK.dtype)
    return torch.cat([lists_QCK, columns_NGK], dim=2)


def _check_lists(selector: Selector[Any, Any], row: _Row) -> None:
    selection, curves_SK = _selected(selector, row)
    layout, lists_QCK = row.layout, _lists(selection)
    if selection.by_token != selector.by_token:
        raise SelectorError(f"lists: by_token is {selector.by_token}, the selection says otherwise")
    own_Q = (layout.block_T if selection.by_token else layout.number_N).cpu()
    if lists_QCK.shape[0] != len(own_Q):
        raise SelectorError(f"lists: {lists_QCK.shape[0]} rows, expected {len(own_Q)}")
    document_N, index_N = layout.document_N.cpu(), layout.index_N.cpu()
    for place, own in enumerate(own_Q.tolist()):
        document = int(document_N[own])
        allowed = min(_BUDGETS[document], int(index_N[own]) + 1)
        for head, listed in enumerate(lists_QCK[place].tolist()):
            blocks = [block for block in listed if block >= 0]
            fits = (
                len(blocks) == int(selection.counts_QC[place, head]) <= allowed
                and blocks[:1] == [own]
                and len(set(blocks)) == len(blocks)
                and all(b <= own and int(document_N[b]) == document for b in blocks)
            )
            if not fits:
                raise SelectorError(
                    f"lists: row {place}, head {head} reads blocks {blocks}: must begin with its "
                    f"own block {own}, and hold at most {allowed} of it and those before it in "
                    "its document, none twice"
                )
    _check_columns(selection)
    assert curves_SK is not None
    _check_coverage(curves_SK.cpu(), layout)


def _check_columns(selection: Selection) -> None:
    if selection.columns is None:
        return
    layout, lists_NGK = selection.kv_layout, _lists(selection)
    block_T, document_N = layout.block_T.cpu(), layout.document_N.cpu()
    columns_NGK = _everything(selection)[..., lists_NGK.shape[2] :]
    for place, head in itertools.product(*map(range, lists_NGK.shape[:2])):
        tokens = [token for token in columns_NGK[place, head].tolist() if token >= 0]
        read = set(lists_NGK[place, head].tolist())
        blocks = block_T[tokens].tolist()
        fits = len(set(tokens)) == len(tokens) and all(
            block < place and document_N[block] == document_N[place] and block not in read
            for block in blocks
        )
        if not fits:
            raise SelectorError(
                f"columns: row {place}, head {head} reads tokens {tokens}: must lie in past blocks "
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


def _check_determinism(selector: Selector[Any, Any], row: _Row) -> None:
    expected, expected_SK = _selected(selector, row)
    tracked = replace(
        row, q_THD=row.q_THD.clone().requires_grad_(), k_TGD=row.k_TGD.clone().requires_grad_()
    )
    again, again_SK = _selected(selector, tracked)
    unseen, _ = _selected(selector, row, observe=False)
    assert expected_SK is not None and again_SK is not None
    if not torch.equal(_everything(again), _everything(expected)) or not torch.equal(
        again_SK, expected_SK
    ):
        raise SelectorError("determinism: the same row gave other lists or coverage")
    if not torch.equal(_everything(unseen), _everything(expected)):
        raise SelectorError("determinism: lists depend on whether coverage is observed")
    if again_SK.requires_grad or again.indices_QCK.requires_grad:
        raise SelectorError("determinism: results carry a gradient; use torch.no_grad")


def _check_documents(selector: Selector[Any, Any], row: _Row) -> None:
    bounds = row.layout.cu_seqlens
    expected, expected_SK = _selected(selector, row)
    assert expected_SK is not None
    for document in range(row.layout.documents):
        found, found_SK = _selected(selector, row.changed(bounds[document], bounds[document + 1]))
        assert found_SK is not None
        other_S = torch.arange(row.layout.documents, device=found_SK.device) != document
        other_T = torch.ones(row.layout.tokens, dtype=torch.bool)
        other_T[bounds[document] : bounds[document + 1]] = False
        moved = _first_moved(found, expected, other_T)
        if moved is not None or not torch.equal(found_SK[other_S], expected_SK[other_S]):
            raise SelectorError(
                f"documents: what document {document} holds changes lists or coverage of another"
                + ("" if moved is None else f", that of token {moved}")
            )


def _check_causality(selector: Selector[Any, Any], row: _Row) -> None:
    expected, _ = _selected(selector, row)
    size = row.layout.block_size
    begin, end = row.layout.cu_seqlens[1:3]
    # Inside, at the beginning and at the end of blocks of the longest document.
    for place in (1, size // 2, size, size + 1, 3 * size - 1, 5 * size + 3):
        token = begin + place
        found, _ = _selected(selector, row.changed(token, end))
        moved = _first_moved(found, expected, torch.arange(row.layout.tokens) < token)
        if moved is not None:
            raise SelectorError(
                f"causality: what token {token} and those after it hold changes the list of token "
                f"{moved}, which comes before them"
            )


def _first_moved(found: Selection, expected: Selection, among_T: Tensor) -> int | None:
    """The first token of a row whose list differs, of rows whose first token is among some."""
    differs_Q = (_everything(found) != _everything(expected)).flatten(1).any(1)
    starts = expected.query_layout.bounds_on_host
    for place in differs_Q.nonzero()[:, 0].tolist():
        token = place if expected.by_token else int(starts[place])
        if among_T[token]:
            return token
    return None
