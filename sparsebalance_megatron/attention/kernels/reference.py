# SPDX-License-Identifier: Apache-2.0
"""Masked dense attention by formula: the yardstick, for every selection.

One document of queries and one head at a time, a mask of queries by keys is written from the
selection. Computes in float32, or float64 for float64 inputs.

Shape legend: Q queries and E keys of a document.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved, wide_dtype
from sparsebalance_megatron.attention.selection import Selection


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    q_THD = given.q_THD
    out_THF = q_THD.new_empty(*q_THD.shape[:2], given.v_TGF.shape[2])
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=wide_dtype(q_THD.dtype))
    for part in _parts(given):
        s_QE = part.q_QD @ part.k_ED.t() * given.softmax_scale
        s_QE = s_QE.masked_fill(~part.mask_QE, -torch.inf)
        lse_Q = s_QE.logsumexp(-1)
        p_QE = _probabilities(s_QE, lse_Q, part.mask_QE)
        out_THF[part.rows] = (p_QE @ part.v_EF).to(q_THD.dtype)
        lse_TH[part.rows] = lse_Q
    return out_THF, lse_TH


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    (q_THD, k_TGD, v_TGF), softmax_scale = saved.qkv, saved.softmax_scale
    dtype = wide_dtype(q_THD.dtype)
    dq_THD = torch.empty_like(q_THD)
    dk_TGD, dv_TGF = torch.zeros_like(k_TGD, dtype=dtype), torch.zeros_like(v_TGF, dtype=dtype)
    for part in _parts(saved):
        rows, unread_E1 = part.rows, ~part.mask_QE.any(0)[:, None]
        dout_QF, out_QF = dout_THF[rows].to(dtype), saved.out_THF[rows].to(dtype)
        s_QE = part.q_QD @ part.k_ED.t() * softmax_scale
        p_QE = _probabilities(s_QE, saved.lse_TH[rows], part.mask_QE)
        dp_QE = dout_QF @ part.v_EF.t()
        ds_QE = p_QE * (dp_QE - (dout_QF * out_QF).sum(-1, keepdim=True))
        dq_THD[rows] = (ds_QE @ part.k_ED * softmax_scale).to(q_THD.dtype)
        dk_ED, dv_EF = ds_QE.t() @ part.q_QD * softmax_scale, p_QE.t() @ dout_QF
        dk_TGD[part.columns] += dk_ED.masked_fill(unread_E1, 0.0)
        dv_TGF[part.columns] += dv_EF.masked_fill(unread_E1, 0.0)
    return dq_THD, dk_TGD.to(k_TGD.dtype), dv_TGF.to(v_TGF.dtype)


def obstacle(q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
    """Find nothing: every selection is served, on every device."""
    return None


class _Part(NamedTuple):
    """One query head of one document: its rows, the keys it may read, and which it does."""

    rows: tuple[slice, int]
    columns: tuple[slice, int]
    q_QD: Tensor
    k_ED: Tensor
    v_EF: Tensor
    mask_QE: Tensor


def _parts(given: Inputs) -> Iterator[_Part]:
    (q_THD, k_TGD, v_TGF), selection = given.qkv, given.selection
    dtype = wide_dtype(q_THD.dtype)
    query_layout, kv_layout = selection.query_layout, selection.kv_layout
    query_heads, kv_heads = q_THD.shape[1], k_TGD.shape[1]
    for document in range(query_layout.documents):
        queries = slice(*query_layout.cu_seqlens[document : document + 2])
        # In another sequence, the document's keys may lie anywhere.
        keys = queries if query_layout is kv_layout else slice(0, kv_layout.tokens)
        for head in range(query_heads):
            rows, columns = (queries, head), (keys, head * kv_heads // query_heads)
            selecting_head = head * selection.counts_QC.shape[1] // query_heads
            mask_QE = _mask(selection, queries, keys, selecting_head)
            # Unread keys become 0, and so do their gradients: NaN times a probability of 0 is NaN.
            unread_E1 = ~mask_QE.any(0)[:, None]
            yield _Part(
                rows=rows,
                columns=columns,
                q_QD=q_THD[rows].to(dtype),
                k_ED=k_TGD[columns].to(dtype).masked_fill(unread_E1, 0.0),
                v_EF=v_TGF[columns].to(dtype).masked_fill(unread_E1, 0.0),
                mask_QE=mask_QE,
            )


def _mask(selection: Selection, queries: slice, keys: slice, selecting_head: int) -> Tensor:
    """True where a query (row) reads a key (column): its block is listed, and not the query's own
    block with the key after the query; or it is one of the columns."""
    query_layout, kv_layout = selection.query_layout, selection.kv_layout
    query_block_Q, key_block_E = query_layout.block_T[queries], kv_layout.block_T[keys]
    token_Q, token_E = _positions(queries, query_block_Q), _positions(keys, key_block_E)
    rows_Q = token_Q if selection.by_token else query_block_Q
    lists_QK = selection.indices_QCK[rows_Q, selecting_head]
    counts_Q = selection.counts_QC[rows_Q, selecting_head]
    listed_QN = _named(lists_QK, counts_Q, slice(0, kv_layout.blocks))
    place_Q = token_Q - query_layout.start_N[query_block_Q]
    place_E = token_E - kv_layout.start_N[key_block_E]
    own_QE = selection.own_block_N[query_block_Q, None] == key_block_E
    read_QE = listed_QN[:, key_block_E] & ~(own_QE & (place_E > place_Q[:, None]))
    columns = selection.columns
    if columns is not None:
        tokens_QK = columns.tokens_NGK[query_block_Q, selecting_head]
        read_QE |= _named(tokens_QK, columns.counts_NG[query_block_Q, selecting_head], keys)
    return read_QE


def _named(lists_QK: Tensor, counts_Q: Tensor, some: slice) -> Tensor:
    """True where a list (row) names one of some numbers (column)."""
    past_end_QK = torch.arange(lists_QK.shape[1], device=lists_QK.device) >= counts_Q[:, None]
    # What lies past a list's end lands in an extra column.
    numbers = some.stop - some.start
    place_QK = (lists_QK.long() - some.start).masked_fill(past_end_QK, numbers)
    named_QX = torch.zeros(len(place_QK), numbers + 1, dtype=torch.bool, device=lists_QK.device)
    return named_QX.scatter_(1, place_QK, True)[:, :-1]


def _positions(tokens: slice, like: Tensor) -> Tensor:
    return torch.arange(tokens.start, tokens.stop, device=like.device)


def _probabilities(s_QE: Tensor, lse_Q: Tensor, mask_QE: Tensor) -> Tensor:
    return (s_QE - lse_Q[:, None]).exp().masked_fill(~mask_QE, 0.0)
