# SPDX-License-Identifier: Apache-2.0
"""Scores of a few rows at a time, ranked in torch or by a Triton kernel.

What is kept is the lists alone, and a sum per document.

Shape legend: N blocks of the keys' row, G KV heads, D head dim, K places of a list, Q rows that
select, C heads that select, E query heads of a selecting head, Y rows of a chunk, W columns of a
chunk (blocks that its rows may read).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsebalance_megatron.attention.precision import exact_product
from sparsebalance_megatron.attention.row_pair import RowPair
from sparsebalance_megatron.attention.selectors.chunks import chunks
from sparsebalance_megatron.attention.selectors.document_mass import DocumentMass
from sparsebalance_megatron.attention.selectors.router_choice import ranks_in_triton
from sparsebalance_megatron.attention.selectors.row_ranking import RowRanker
from sparsebalance_megatron.config import Router

CHUNK_ELEMENTS = 1 << 18
"""Scores computed at once: 1 MiB in float32, about a core's second-level cache."""
_LARGER_ON_CUDA = 2
KERNEL_CHUNK_ELEMENTS = 1 << 23
"""The same for the kernel, which needs nothing beside them: 32 MiB, within an H100's second-level
cache. Of queries, widened, as many elements at once."""


def rank_in_chunks(
    askers_QCED: Tensor,
    keys_NGD: Tensor,
    rows: RowPair,
    *,
    by_token: bool,
    softmax_scale: float,
    places: int,
    observe: bool,
    router: Router = "torch",
) -> tuple[Tensor, Tensor | None]:
    """indices_QCK of ``places`` places and mass_SK of :class:`..ranking.Ranking`.

    Both routers rank the scores of one product: where its bits are the same, lists are the same,
    and mass to float32 rounding.

    Args:
        askers_QCED: a row asks with the mean over E.
        keys_NGD: mean keys of the blocks of the keys' row; C is a multiple of G.
        by_token: whether rows are tokens, or blocks that speak for their tokens.
        router: who ranks; see :func:`..router_choice.ranks_in_triton`.

    Raises:
        ValueError: ``router`` is "triton", and it does not serve.
    """
    _, heads, group, head_dim = askers_QCED.shape
    kv_layout, device = rows.kv_layout, keys_NGD.device
    if ranks_in_triton(router, device, rows, softmax_scale=softmax_scale):
        from sparsebalance_megatron.attention.selectors.row_ranking_kernel import KernelRowRanker

        ranker: RowRanker | KernelRowRanker = KernelRowRanker(
            rows, softmax_scale=softmax_scale, observe=observe
        )
        elements = KERNEL_CHUNK_ELEMENTS
        most_rows: int | None = max(1, elements // (heads * group * head_dim))
    else:
        ranker = RowRanker(device, softmax_scale=softmax_scale, observe=observe)
        elements = CHUNK_ELEMENTS * (_LARGER_ON_CUDA if device.type == "cuda" else 1)
        most_rows = None
    own_Q = rows.row_block(by_token=by_token)
    first_Q = kv_layout.first_block_S[kv_layout.document_N[own_Q]]
    indices_QCK = torch.empty(len(own_Q), heads, places, dtype=torch.int32, device=device)
    mass = DocumentMass(rows, by_token=by_token) if observe else None
    for chunk in chunks(
        rows, by_token=by_token, heads=heads, elements=elements, most_rows=most_rows
    ):
        lists_YCK = indices_QCK[chunk.rows]
        seen = ranker.rank_(
            _scores(askers_QCED[chunk.rows], keys_NGD[chunk.blocks]),
            own_Q[chunk.rows],
            first_Q[chunk.rows],
            lists_YCK,
            first_column=chunk.blocks.start,
        )
        if mass is not None and seen is not None:
            mass.add(chunk.rows, chunk.documents, *seen)
    return indices_QCK, None if mass is None else mass.of_documents()


def _scores(askers_YCED: Tensor, keys_WGD: Tensor) -> Tensor:
    """float32 [C, Y, W], before the softmax scale."""
    queries_CYD = askers_YCED.float().mean(2).transpose(0, 1)
    per_key = queries_CYD.shape[0] // keys_WGD.shape[1]
    keys_CWD = keys_WGD.float().transpose(0, 1).repeat_interleave(per_key, dim=0)
    return exact_product(queries_CYD, keys_CWD.transpose(1, 2))
