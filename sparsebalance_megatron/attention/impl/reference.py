# SPDX-License-Identifier: Apache-2.0
"""Masked dense attention: the yardstick, and the way of selections by token.

One document and one head at a time, a mask of tokens by tokens is written from the selection and
given to torch's attention. Time is quadratic in a document's tokens and does not fall with the
budget. Masks are made anew in the backward pass, so memory between passes is linear.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, J blocks of the
document, L tokens of the document, K width of lists.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from sparsebalance_megatron.attention.selection import Selection


def attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection of any granularity; see :func:`..api.block_sparse_attention`.

    Computes in the dtype of the inputs.
    """
    query_heads, kv_heads = q_THD.shape[1], k_TGD.shape[1]
    documents = []
    for document in range(selection.layout.documents):
        begin, end = selection.layout.cu_seqlens[document : document + 2]
        heads = []
        for head in range(query_heads):
            kv_head = head * kv_heads // query_heads
            lists_LK = _lists(selection, document, head, query_heads)
            heads.append(
                checkpoint(
                    _attend,
                    q_THD[begin:end, head],
                    k_TGD[begin:end, kv_head],
                    v_TGD[begin:end, kv_head],
                    lists_LK,
                    selection.layout.block_size,
                    softmax_scale,
                    use_reentrant=False,
                    preserve_rng_state=False,
                )
            )
        documents.append([torch.stack(parts, dim=1) for parts in zip(*heads, strict=True)])
    out_THD, lse_TH = (torch.cat(parts) for parts in zip(*documents, strict=True))
    return out_THD, lse_TH


def _lists(selection: Selection, document: int, head: int, query_heads: int) -> Tensor:
    """A head's list for every token of a document, numbered inside it; -1 past a list's end."""
    layout = selection.layout
    begin, end = layout.cu_seqlens[document : document + 2]
    selecting_head = head * selection.indices_RCK.shape[1] // query_heads
    if selection.granularity == "query-block":
        rows = layout.block_T[begin:end]
    else:
        rows = torch.arange(begin, end, device=layout.block_T.device)
    lists_LK = selection.indices_RCK[rows, selecting_head].long()
    counts_L = selection.counts_RC[rows, selecting_head]
    present_LK = torch.arange(lists_LK.shape[1], device=rows.device) < counts_L[:, None]
    return torch.where(present_LK, lists_LK - layout.first_block_S[document], -1)


def _attend(
    q_LD: Tensor,
    k_LD: Tensor,
    v_LD: Tensor,
    lists_LK: Tensor,
    block_size: int,
    softmax_scale: float,
) -> tuple[Tensor, Tensor]:
    """One head of one document: out [L, D] and lse [L]."""
    mask_LL = _mask(lists_LK, block_size)
    out_LD = scaled_dot_product_attention(
        q_LD[None, None], k_LD[None, None], v_LD[None, None], attn_mask=mask_LL, scale=softmax_scale
    )[0, 0]
    with torch.no_grad():
        dtype = torch.promote_types(q_LD.dtype, torch.float32)
        scores_LL = q_LD.to(dtype) @ k_LD.to(dtype).t() * softmax_scale
        lse_L = scores_LL.masked_fill_(~mask_LL, -torch.inf).logsumexp(-1)
    return out_LD, lse_L


def _mask(lists_LK: Tensor, block_size: int) -> Tensor:
    """True where a query (row) reads a key (column): its block is listed, and it is not later."""
    tokens = lists_LK.shape[0]
    blocks = -(-tokens // block_size)
    # Padding lands in an extra column 0, which no key belongs to.
    listed_LJ = torch.zeros(tokens, blocks + 1, dtype=torch.bool, device=lists_LK.device)
    listed_LJ.scatter_(1, lists_LK + 1, True)
    position_L = torch.arange(tokens, device=lists_LK.device)
    listed_LL = listed_LJ[:, position_L // block_size + 1]
    return listed_LL & (position_L <= position_L[:, None])
