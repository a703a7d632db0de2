# SPDX-License-Identifier: Apache-2.0
"""Masked dense attention by formula: the yardstick, for every selection.

One document of queries and one head at a time, a mask of queries by keys is written from the
selection. Computes in float32, or float64 for float64 inputs.

Shape legend: Q queries and W keys of a document.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved, wide_dtype
from sparsebalance_megatron.attention.selection import Selection, named


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    q_THD = given.q_THD
    out_THF = q_THD.new_empty(*q_THD.shape[:2], given.v_TGF.shape[2])
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=wide_dtype(q_THD.dtype))
    for part in _parts(given):
        s_QW = part.q_QD @ part.k_WD.t() * given.softmax_scale
        s_QW = s_QW.masked_fill(~part.mask_QW, -torch.inf)
        lse_Q = s_QW.logsumexp(-1)
        p_QW = _probabilities(s_QW, lse_Q, part.mask_QW)
        out_THF[part.rows] = (p_QW @ part.v_WF).to(q_THD.dtype)
        lse_TH[part.rows] = lse_Q
    return out_THF, lse_TH


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    (q_THD, k_TGD, v_TGF), softmax_scale = saved.qkv, saved.softmax_scale
    dtype = wide_dtype(q_THD.dtype)
    dq_THD = torch.empty_like(q_THD)
    dk_TGD, dv_TGF = torch.zeros_like(k_TGD, dtype=dtype), torch.zeros_like(v_TGF, dtype=dtype)
    for part in _parts(saved):
        rows, unread_W1 = part.rows, ~part.mask_QW.any(0)[:, None]
        dout_QF, out_QF = dout_THF[rows].to(dtype), saved.out_THF[rows].to(dtype)
        s_QW = part.q_QD @ part.k_WD.t() * softmax_scale
        p_QW = _probabilities(s_QW, saved.lse_TH[rows], part.mask_QW)
        dp_QW = dout_QF @ part.v_WF.t()
        ds_QW = p_QW * (dp_QW - (dout_QF * out_QF).sum(-1, keepdim=True))
        dq_THD[rows] = (ds_QW @ part.k_WD * softmax_scale).to(q_THD.dtype)
        dk_WD, dv_WF = ds_QW.t() @ part.q_QD * softmax_scale, p_QW.t() @ dout_QF
        dk_TGD[part.columns] += dk_WD.masked_fill(unread_W1, 0.0)
        dv_TGF[part.columns] += dv_WF.masked_fill(unread_W1, 0.0)
    return dq_THD, dk_TGD.to(k_TGD.dtype), dv_TGF.to(v_TGF.dtype)


def obstacle(q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
    """Find nothing: every selection is served, on every device."""
    return None


class _Part(NamedTuple):
    """One query head of one document: its rows, the keys it may read, and which it does."""

    rows: tuple[slice, int]
    columns: tuple[slice, int]
    q_QD: Tensor
    k_WD: Tensor
    v_WF: Tensor
    mask_QW: Tensor


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
            mask_QW = _mask(selection, queries, keys, selecting_head)
            # Unread keys become 0, and so do their gradients: NaN times a probability of 0 is NaN.
            unread_W1 = ~mask_QW.any(0)[:, None]
            yield _Part(
                rows=rows,
                columns=columns,
                q_QD=q_THD[rows].to(dtype),
                k_WD=k_TGD[columns].to(dtype).masked_fill(unread_W1, 0.0),
                v_WF=v_TGF[columns].to(dtype).masked_fill(unread_W1, 0.0),
                mask_QW=mask_QW,
            )


def _mask(selection: Selection, queries: slice, keys: slice, selecting_head: int) -> Tensor:
    """True where a query (row) reads a key (column): its block is listed, and not the query's own
    block with the key after the query; or it is one of the columns."""
    query_layout, kv_layout = selection.query_layout, selection.kv_layout
    query_block_Q, key_block_W = query_layout.block_T[queries], kv_layout.block_T[keys]
    token_Q, token_W = _positions(queries, query_block_Q), _positions(keys, key_block_W)
    rows_Q = token_Q if selection.by_token else query_block_Q
    lists_QK = selection.indices_QCK[rows_Q, selecting_head]
    counts_Q = selection.counts_QC[rows_Q, selecting_head]
    listed_QN = named(lists_QK, counts_Q, kv_layout.blocks)
    place_Q = token_Q - query_layout.start_N[query_block_Q]
    place_W = token_W - kv_layout.start_N[key_block_W]
    own_QW = selection.own_block_N[query_block_Q, None] == key_block_W
    read_QW = listed_QN[:, key_block_W] & ~(own_QW & (place_W > place_Q[:, None]))
    columns = selection.columns
    if columns is not None:
        tokens_QK = columns.tokens_NGK[query_block_Q, selecting_head] - keys.start
        counts_Q = columns.counts_NG[query_block_Q, selecting_head]
        read_QW |= named(tokens_QK, counts_Q, keys.stop - keys.start)
    return read_QW


def _positions(tokens: slice, like: Tensor) -> Tensor:
    return torch.arange(tokens.start, tokens.stop, device=like.device)


def _probabilities(s_QW: Tensor, lse_Q: Tensor, mask_QW: Tensor) -> Tensor:
    return (s_QW - lse_Q[:, None]).exp().masked_fill(~mask_QW, 0.0)
