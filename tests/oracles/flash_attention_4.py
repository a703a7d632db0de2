# SPDX-License-Identifier: Apache-2.0
"""What the functions of flash-attn-4 4.0.0b36 compute, read from its source, in the inputs' dtype.

Packed documents take ``cu_seqlens``; batches take lists of tiles of keys, by block of queries. A
list is walked from its last entry, and a tile that was visited first is alone cut where a sequence
ends: what lies beyond the end of another tile is read as zeros. A backward pass walks the readers
of tiles of keys.

Shape legend: B batch, M blocks of queries, X tiles of keys, I rows, J keys.
"""

import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels import fa4, fa4_lists

KEYS_AT_ONCE = 4
"""Keys of a tile that a kernel multiplies at once, where a list's tiles are a multiple."""


class Lists(NamedTuple):
    """``flash_attn.cute.block_sparsity.BlockSparseTensorsTorch``: counts [B, 1, M] and places."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor
    full_block_idx: Tensor
    block_size: tuple[int, int]


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    softmax_scale: float,
    return_lse: bool,
    mask_mod: Callable[..., Tensor] | None = None,
    block_sparse_tensors: Lists | None = None,
    **bounds: Any,
) -> tuple[Tensor | None, ...]:
    assert return_lse
    assert all(map(is_aligned, (q, k, v)))
    out = q.new_full((*q.shape[:-1], v.shape[-1]), torch.nan)
    lse = q.new_full((*q.shape[:-3], q.shape[-2], q.shape[-3]), torch.nan)
    for of_rows, of_keys, allowed, of_lse in _walked(q, k, mask_mod, block_sparse_tensors, bounds):
        kk, vv = (_read(x, of_keys) for x in (k, v))
        s = (q[of_rows] @ kk.mT * softmax_scale).masked_fill(~allowed, -torch.inf)
        total = s.logsumexp(-1)
        lse[of_lse] = total
        total = total.masked_fill(total == -torch.inf, 0.0)
        out[of_rows] = (s - total[:, None]).exp() @ vv
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
    deterministic: bool = False,
    mask_mod: Callable[..., Tensor] | None = None,
    block_sparse_tensors: Lists | None = None,
    **bounds: Any,
) -> tuple[Tensor, ...]:
    assert all(map(is_aligned, (q, k, v, out, dout)))
    assert lse.is_contiguous()
    assert not (deterministic and block_sparse_tensors)
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    finite = lse.masked_fill(lse == -torch.inf, 0.0)
    for of_rows, of_keys, allowed, of_lse in _walked(
        q, k, mask_mod, block_sparse_tensors, bounds, is_backward=True
    ):
        kk, vv = (_read(x, of_keys) for x in (k, v))
        s = (q[of_rows] @ kk.mT * softmax_scale).masked_fill(~allowed, -torch.inf)
        p = (s - finite[of_lse][:, None]).exp()
        dp = dout[of_rows] @ vv.mT - (dout[of_rows] * out[of_rows]).sum(-1, keepdim=True)
        ds = p * dp * softmax_scale
        dq[of_rows] += ds @ kk
        *batch, keys, head = of_keys
        is_key = keys < k.shape[-3]
        dk[(*batch, keys[is_key], head)] += (ds.mT @ q[of_rows])[is_key]
        dv[(*batch, keys[is_key], head)] += (p.mT @ dout[of_rows])[is_key]
    return dq, dk, dv


def _read(x: Tensor, of_keys: tuple[Any, ...]) -> Tensor:
    """Keys or values; zeros past the end of the memory."""
    *batch, keys, head = of_keys
    inside = keys < x.shape[-3]
    return x[(*batch, keys.where(inside, 0), head)].where(inside[:, None], 0.0)


def _walked(
    q: Tensor,
    k: Tensor,
    mask_mod: Callable[..., Tensor] | None,
    lists: Lists | None,
    bounds: dict[str, Any],
    *,
    is_backward: bool = False,
) -> Iterator[tuple[tuple[Any, ...], tuple[Any, ...], Tensor, tuple[Any, ...]]]:
    """Places of rows and of keys that meet, which of them do [I, J], and places of the rows' LSE.
    Forward, all keys of a row come at once."""
    heads, group = q.shape[-2], q.shape[-2] // k.shape[-2]
    if lists is None:
        for rows, keys, allowed in _documents(**bounds):
            for head in range(heads):
                yield (rows, head), (keys, head // group), allowed, (head, rows)
        return
    assert not bounds and mask_mod is not None and k.shape[-2] == 1
    walk = _by_readers if is_backward else _by_lists
    for b in range(len(q)):
        for rows, keys, allowed in walk(lists, mask_mod, b, q.shape[1], k.shape[1]):
            for head in range(heads):
                yield (b, rows, head), (b, keys, 0), allowed, (b, head, rows)


def _documents(
    *,
    causal: bool,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for bounds, longest in ((cu_seqlens_q, max_seqlen_q), (cu_seqlens_k, max_seqlen_k)):
        assert bounds.dtype == torch.int32 and bounds.is_contiguous()
        assert isinstance(longest, int) and int(bounds.diff().max()) <= longest
    of_both = (pairwise(x.tolist()) for x in (cu_seqlens_q, cu_seqlens_k))
    for of_rows, of_keys in zip(*of_both, strict=True):
        rows, keys = torch.arange(*of_rows), torch.arange(*of_keys)
        yield rows, keys, (rows[:, None] >= keys) | (not causal)


_Met = Iterator[tuple[Tensor, Tensor, Tensor]]


def _by_lists(
    lists: Lists, mask_mod: Callable[..., Tensor], b: int, queries: int, keys: int
) -> _Met:
    rows, size = lists.block_size
    at_once = KEYS_AT_ONCE if size % KEYS_AT_ONCE == 0 else size
    tiles = -(-queries // rows)
    assert lists.full_block_cnt.shape[1:] == lists.mask_block_cnt.shape[1:] == (1, tiles)
    for m in range(tiles):
        asking = torch.arange(m * rows, min((m + 1) * rows, queries))
        met = [(torch.arange(0), torch.ones(len(asking), 0, dtype=torch.bool))]
        for masked, found in _entries(lists, b, m):
            starts = [x * size + some for x in found for some in range(0, size, at_once)]
            for place, start in enumerate(reversed(starts)):
                some = torch.arange(start, start + at_once)
                allowed = torch.ones(len(asking), at_once, dtype=torch.bool)
                if masked:
                    allowed &= mask_mod(b, 0, asking[:, None], some, None, None)
                if place == 0:
                    allowed &= some < keys
                met.append((some, allowed))
        yield asking, *(torch.cat(each, -1) for each in zip(*met, strict=True))


def _by_readers(
    lists: Lists, mask_mod: Callable[..., Tensor], b: int, queries: int, keys: int
) -> _Met:
    rows, size = lists.block_size
    assert lists.full_block_cnt.shape[2] == -(-keys // size)
    for x in range(-(-keys // size)):
        some = torch.arange(x * size, min((x + 1) * size, keys))
        for masked, readers in _entries(lists, b, x):
            for m in readers:
                asking = torch.arange(m * rows, min((m + 1) * rows, queries))
                allowed = torch.ones(len(asking), len(some), dtype=torch.bool)
                if masked:
                    allowed &= mask_mod(b, 0, asking[:, None], some, None, None)
                yield asking, some, allowed


def _entries(lists: Lists, b: int, row: int) -> Iterator[tuple[bool, list[int]]]:
    """Whether a list takes the mask, and the tiles that it names, each once."""
    for masked, counts, places in (
        (True, lists.mask_block_cnt, lists.mask_block_idx),
        (False, lists.full_block_cnt, lists.full_block_idx),
    ):
        assert counts.dtype == places.dtype == torch.int32
        assert counts.is_contiguous() and places.is_contiguous()
        found = places[b, 0, row, : int(counts[b, 0, row])].tolist()
        assert len(set(found)) == len(found)
        yield masked, found


def is_aligned(x: Tensor) -> bool:
    """Whether kernels may read 16 bytes at a time."""
    places = x.storage_offset(), *x.stride()[:-1]
    return x.stride(-1) == 1 and not any(place * x.element_size() % 16 for place in places)


def emulate(patch: pytest.MonkeyPatch, *, tile: int = 8) -> None:
    """Lists are attended to by these functions, on the CPU in any dtype."""

    def of_lists(block_size: int) -> tuple[Any, Any]:
        def up_to_itself(b: int, h: int, q_idx: Tensor, kv_idx: Tensor, *_: Any) -> Tensor:
            return (q_idx % block_size) >= (kv_idx % block_size)

        return Lists, up_to_itself

    patch.setattr(fa4, "interface", lambda: sys.modules[__name__])
    patch.setattr(fa4_lists, "obstacle", lambda *_: None)
    patch.setattr(fa4_lists, "_tile", lambda _: tile)
    patch.setattr(fa4_lists, "of_lists", of_lists)
