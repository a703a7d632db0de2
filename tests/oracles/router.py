# SPDX-License-Identifier: Apache-2.0
"""The router with everything at once: all scores of a sequence, one stable sort, float64 mass.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, S documents,
N blocks of the sequence, K places (as many as blocks), Q rows that select, C heads that select.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oracles.attention import blocks_of


def scores_at_once(
    q_THD: Tensor, k_TGD: Tensor, cu_seqlens: list[int], block_size: int, granularity: str
) -> tuple[Tensor, Tensor]:
    """float32 [Q, C, N], -inf where a row sees nothing; and the block [Q] of each row."""
    blocks = blocks_of(cu_seqlens, block_size)
    heads = q_THD.shape[1] if granularity == "token-query-head" else k_TGD.shape[1]
    grouped_TCED = q_THD.float().unflatten(1, (heads, -1))
    means = [k_TGD[begin:end].float().mean(0).to(k_TGD.dtype) for _, begin, end in blocks]
    keys_NCD = torch.stack(means).float().repeat_interleave(heads // k_TGD.shape[1], 1)
    if granularity.startswith("token"):
        queries_QCD = grouped_TCED.mean(2)
        lengths = torch.tensor([end - begin for _, begin, end in blocks])
        own_Q = torch.arange(len(blocks)).repeat_interleave(lengths)
    else:
        speaking = [grouped_TCED[begin:end] for _, begin, end in blocks]
        speaking = [speaking[0], *speaking[:-1]]
        queries_QCD = torch.stack([x.mean((0, 2)) for x in speaking])
        own_Q = torch.arange(len(blocks))
    scores_QCN = torch.einsum("qcd,ncd->qcn", queries_QCD, keys_NCD)
    document_N = torch.tensor([document for document, _, _ in blocks])
    number_N = torch.arange(len(blocks))
    hidden_QN = (document_N != document_N[own_Q, None]) | (number_N > own_Q[:, None])
    return scores_QCN.masked_fill(hidden_QN[:, None], -math.inf), own_Q


def kept_at_once(scores_QCN: Tensor, own_Q: Tensor, first_blocks: int) -> Tensor:
    """float32 [Q, C, N]: scores, but of the first blocks 1e30 times what is left of them, and of
    the own block infinity."""
    kept_QCN = scores_QCN.clone()
    for row, own in enumerate(own_Q.tolist()):
        (visible,) = (scores_QCN[row, 0] > -math.inf).nonzero(as_tuple=True)
        for place, block in enumerate(visible.tolist()[:first_blocks]):
            kept_QCN[row, :, block] = (first_blocks - place) * 1e30
        kept_QCN[row, :, own] = math.inf
    return kept_QCN


def lists_at_once(scores_QCN: Tensor, own_Q: Tensor, places: int, first_blocks: int = 1) -> Tensor:
    """int32 [Q, C, places]: the own block, first ones, then the others by a stable sort; -1 past
    the end."""
    blocks = scores_QCN.shape[2]
    ranked_QCN = kept_at_once(scores_QCN, own_Q, first_blocks)
    values, number_QCK = ranked_QCN.sort(dim=-1, descending=True, stable=True)
    number_QCK = number_QCK.masked_fill(values == -math.inf, -1)
    padded = torch.nn.functional.pad(number_QCK, (0, max(0, places - blocks)), value=-1)
    return padded[..., :places].int()


def mass_at_once(
    scores_QCN: Tensor,
    own_Q: Tensor,
    cu_seqlens: list[int],
    block_size: int,
    softmax_scale: float,
    *,
    by_token: bool,
    first_blocks: int = 1,
) -> Tensor:
    """float64 [S, K]: mass in every place, summed over the tokens and heads of a document."""
    blocks = blocks_of(cu_seqlens, block_size)
    mass_QCN = (scores_QCN.double() * softmax_scale).softmax(-1)
    order_QCK = kept_at_once(scores_QCN, own_Q, first_blocks).argsort(
        dim=-1, descending=True, stable=True
    )
    mass_QK = mass_QCN.gather(2, order_QCK).sum(1)
    if not by_token:
        mass_QK *= torch.tensor([end - begin for _, begin, end in blocks])[:, None]
    total_SK = torch.zeros(len(cu_seqlens) - 1, mass_QK.shape[1], dtype=torch.float64)
    for row, own in enumerate(own_Q.tolist()):
        total_SK[blocks[own][0]] += mass_QK[row]
    return total_SK
