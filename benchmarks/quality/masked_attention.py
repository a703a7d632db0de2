# SPDX-License-Identifier: Apache-2.0
"""Attention over selected blocks as torch's fused attention under a mask, document by document.

It computes what the plugin's kernels compute; in documents of a few hundred tokens, where a mask
costs nothing, it is several times as fast on a CPU.

Shape legend: T tokens of the packed sequence, t tokens of a document, H query heads, G KV heads, D
head dim, N block number inside a document (as a size: the most blocks of any), Q rows that select,
C heads that select, K places of a list.
"""

from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparsebalance_megatron.attention.selection import ColumnLists, Selection


def masked_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    selection: Selection,
    *,
    softmax_scale: float,
    implementation: str = "auto",
    sink_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Takes the place of ``block_sparse_attention``; queries and keys lie in one row.

    No arm has attention sinks.

    Returns:
        out_THD, and NaN in place of lse_TH, which nothing here reads.
    """
    layout = selection.query_layout
    heads = q_THD.shape[1]
    selecting = selection.counts_QC.shape[1]
    listed_QCN = listed_blocks(selection)
    outputs = []
    for first, end in pairwise(layout.cu_seqlens):
        block_t = layout.block_T[first:end]
        rows_t = slice(first, end) if selection.by_token else block_t
        listed_Ctt = listed_QCN[rows_t][:, :, layout.index_N[block_t]].transpose(0, 1)
        past_tt = torch.ones(end - first, end - first, dtype=torch.bool).tril()
        if selection.columns is not None:
            listed_Ctt |= _columns(selection.columns, block_t, first, end)
        mask_1Htt = (listed_Ctt & past_tt).repeat_interleave(heads // selecting, 0)[None]
        q_1HtD, k_1GtD, v_1GtD = (x[first:end].transpose(0, 1)[None] for x in (q_THD, k_TGD, v_TGD))
        out_1HtD = scaled_dot_product_attention(
            q_1HtD, k_1GtD, v_1GtD, attn_mask=mask_1Htt, scale=softmax_scale, enable_gqa=True
        )
        outputs.append(out_1HtD[0].transpose(0, 1))
    return torch.cat(outputs), q_THD.new_full(q_THD.shape[:2], torch.nan)


def _columns(columns: ColumnLists, block_t: Tensor, first: int, end: int) -> Tensor:
    """bool [C, t, t]: whether a row's head reads a single token of its document."""
    tokens_NCK, counts_NC = (x[block_t[0] : block_t[-1] + 1] for x in vars(columns).values())
    past_end_NCK = torch.arange(tokens_NCK.shape[2]) >= counts_NC[..., None]
    place_NCK = (tokens_NCK - first).long().masked_fill_(past_end_NCK, end - first)
    read_NCt = torch.zeros(*tokens_NCK.shape[:2], end - first + 1, dtype=torch.bool)
    read_NCt.scatter_(2, place_NCK, True)
    return read_NCt[block_t - block_t[0], :, :-1].transpose(0, 1)


def listed_blocks(selection: Selection) -> Tensor:
    """bool [Q, C, N]: whether a row's head reads block N of its document."""
    layout = selection.query_layout
    block_Q = layout.block_T if selection.by_token else layout.number_N
    first_Q = layout.first_block_S[layout.document_N[block_Q]]
    width = layout.max_blocks
    lists_QCK = selection.indices_QCK
    past_end_QCK = torch.arange(lists_QCK.shape[2]) >= selection.counts_QC[..., None]
    number_QCK = (lists_QCK - first_Q[:, None, None]).long().masked_fill_(past_end_QCK, width)
    listed_QCN = torch.zeros(*lists_QCK.shape[:2], width + 1, dtype=torch.bool)
    return listed_QCN.scatter_(2, number_QCK, True)[..., :width]
