# SPDX-License-Identifier: Apache-2.0
"""What flash-attn-4 4.0.0b36 computes for packed documents, read from its source, in the inputs'
dtype; it refuses what the kernels do not take."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def _flash_attn_fwd(
    q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, return_lse: bool, **bounds: Any
) -> tuple[Tensor | None, ...]:
    assert return_lse
    out = q.new_full((*q.shape[:2], v.shape[2]), torch.nan)
    lse = q.new_full(q.shape[1::-1], torch.nan)
    for rows, keys, later in _heads_of_documents((q, k, v), **bounds):
        s = (q[rows] @ k[keys].T * softmax_scale).masked_fill(later, -torch.inf)
        lse[rows[::-1]] = s.logsumexp(-1)
        out[rows] = s.softmax(-1) @ v[keys]
    return out, lse, None, None, None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    *,
    softmax_scale: float,
    deterministic: bool,
    **bounds: Any,
) -> tuple[Tensor, ...]:
    assert lse.is_contiguous() and lse.shape == q.shape[1::-1]
    dq, dk, dv = gradients = [torch.zeros_like(x) for x in (q, k, v)]
    for rows, keys, later in _heads_of_documents((q, k, v, out, dout), **bounds):
        s = (q[rows] @ k[keys].T * softmax_scale).masked_fill(later, -torch.inf)
        p = (s - lse[rows[::-1]][:, None]).exp()
        dp = dout[rows] @ v[keys].T - (dout[rows] * out[rows]).sum(-1, keepdim=True)
        ds = p * dp * softmax_scale
        dq[rows] = ds @ k[keys]
        dk[keys] += ds.T @ q[rows]
        dv[keys] += p.T @ dout[rows]
    return tuple(gradients)


def _heads_of_documents(
    xs: tuple[Tensor, ...],
    *,
    causal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Iterator[tuple[tuple[slice, int], tuple[slice, int], Tensor]]:
    """Rows of a document and a query head, keys and their head, and keys not to be read."""
    q, k, v, *_ = xs
    assert q.shape[2] == k.shape[2] == v.shape[2] and q.shape[2] % 8 == 0
    group = q.shape[1] // k.shape[1]
    for bounds, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous()
        assert isinstance(longest, int) and int(bounds.diff().max()) <= longest
    assert all(map(is_aligned, xs))
    bounds = (pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
    for (a, b), (c, d) in zip(*bounds, strict=True):
        later = torch.ones(b - a, d - c, dtype=torch.bool).triu(1) & causal
        for head in range(q.shape[1]):
            yield (slice(a, b), head), (slice(c, d), head // group), later


def is_aligned(x: Tensor) -> bool:
    """Whether kernels may read 16 bytes at a time."""
    places = x.storage_offset(), *x.stride()[:-1]
    return x.stride(-1) == 1 and not any(place * x.element_size() % 16 for place in places)
