# SPDX-License-Identifier: Apache-2.0
"""Torch's flash operations on the CPU: dense, in float64 inside, as unforgiving as on CUDA.

Rows of no segment hold NaN. A query without keys has output 0 and log-sum-exp +inf. Strides,
dtypes, bounds and maxima that the kernels on CUDA do not take, or overstep, are refused.

Shape legend: T tokens of the queries, U of the keys, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels import flash

calls: list[str] = []


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_forward``."""
    calls.append("forward")
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    wide = torch.promote_types(query.dtype, torch.float32)
    out_THD = torch.full(query.shape, torch.nan, dtype=query.dtype)
    lse_HT = torch.full((query.shape[1], len(query)), torch.nan, dtype=wide)
    for queries, keys in _segments(cum_seq_q, cum_seq_k):
        s, _, v = _scores(query[queries], key[keys], value[keys], is_causal, scale)
        unread = s.shape[2] == 0
        out_THD[queries] = 0.0 if unread else (s.softmax(-1) @ v).transpose(0, 1).to(query.dtype)
        lse_HT[:, queries] = torch.inf if unread else s.logsumexp(-1).to(wide)
    nothing = torch.empty(0)
    return out_THD, lse_HT, torch.empty(2, dtype=torch.uint64), nothing, nothing


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor,
    cum_seq_k: Tensor,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """``aten::_flash_attention_backward``."""
    calls.append("backward")
    _check(query, key, value, cum_seq_q, cum_seq_k, max_q, max_k)
    _check(grad_out, key, out, cum_seq_q, cum_seq_k, max_q, max_k)
    assert logsumexp.is_contiguous()
    assert logsumexp.shape == (query.shape[1], len(query))
    assert logsumexp.dtype == torch.promote_types(query.dtype, torch.float32)
    gradients = [torch.full(x.shape, torch.nan, dtype=x.dtype) for x in (query, key, value)]
    dq_THD, dk_UGD, dv_UGD = gradients
    for queries, keys in _segments(cum_seq_q, cum_seq_k):
        s, k, v = _scores(query[queries], key[keys], value[keys], is_causal, scale)
        q, dout, o = (x[queries].double().transpose(0, 1) for x in (query, grad_out, out))
        p = (s - logsumexp[:, queries, None].double()).exp()
        ds = p * (dout @ v.transpose(1, 2) - (dout * o).sum(-1, keepdim=True)) * scale
        dq_THD[queries] = (ds @ k).transpose(0, 1).to(dq_THD.dtype)
        for whole, dx in ((dk_UGD, ds.transpose(1, 2) @ q), (dv_UGD, p.transpose(1, 2) @ dout)):
            by_kv_head = dx.unflatten(0, (key.shape[1], -1)).sum(1)
            whole[keys] = by_kv_head.transpose(0, 1).to(whole.dtype)
    return dq_THD, dk_UGD, dv_UGD


def _segments(cum_seq_q: Tensor, cum_seq_k: Tensor) -> Iterator[tuple[slice, slice]]:
    bounds = pairwise(cum_seq_q.tolist()), pairwise(cum_seq_k.tolist())
    return ((slice(*queries), slice(*keys)) for queries, keys in zip(*bounds, strict=True))


def _scores(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Scaled scores [H, T, U], and keys and values [H, U, D] of every query head, in float64."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.double().transpose(0, 1).repeat_interleave(group, 0) for x in (k, v))
    s = q.double().transpose(0, 1) @ k.transpose(1, 2) * scale
    if causal:
        later = torch.ones(s.shape[1:], dtype=torch.bool).triu(1 + s.shape[2] - s.shape[1])
        s = s.masked_fill(later, -torch.inf)
    return s, k, v


def _check(
    q: Tensor, k: Tensor, v: Tensor, cum_q: Tensor, cum_k: Tensor, max_q: int, max_k: int
) -> None:
    assert q.shape[2] == k.shape[2] == v.shape[2] <= 256
    assert q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[1] == 0
    for x in (q, k, v):
        assert x.ndim == 3
        assert x.stride(2) == 1
        size = x.element_size()
        assert not any(place * size % 16 for place in (x.storage_offset(), *x.stride()[:2]))
    for bounds, longest, x in ((cum_q, max_q, q), (cum_k, max_k, k)):
        assert bounds.dtype == torch.int32
        assert bounds.is_contiguous()
        assert 1 <= len(bounds) - 1 <= 65_535
        lengths = bounds.diff()
        assert 0 <= int(lengths.min()) <= int(lengths.max()) <= longest
        assert 0 <= int(bounds[0]) <= int(bounds[-1]) <= len(x)


@contextlib.contextmanager
def flash_on_cpu() -> Iterator[list[str]]:
    """A context in which "flash" serves the CPU, in any dtype; gives the names of its calls."""
    with (
        pytest.MonkeyPatch.context() as patch,
        torch.library._scoped_library("aten", "IMPL") as ops,
    ):
        ops.impl("_flash_attention_forward", forward, "CPU")
        ops.impl("_flash_attention_backward", backward, "CPU")
        patch.setattr(flash.varlen, "obstacle", lambda *_: None)
        calls.clear()
        yield calls
