# SPDX-License-Identifier: Apache-2.0
"""Dense attention of slices in squares and rectangles, against a mask and softmax."""

import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from attention.sequence.slices import BLOCK, InOneProcess, random_owners, slices_of
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebalance_megatron.attention.kernels import dense
from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.exchange import ExchangingKernel
from sparsebalance_megatron.attention.sequence.pieces import DensePieces

SCALE = 0.3


def _naive(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Sequence[int]) -> Tensor:
    """Causal within documents, one key head for several query heads."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    document_T = torch.from_numpy(np.searchsorted(cu_seqlens, np.arange(len(q)), side="right"))
    reads = (document_T[:, None] == document_T) & torch.ones(len(q), len(q)).bool().tril()
    s = (q.transpose(0, 1) @ k.mT * SCALE).masked_fill(~reads, -math.inf)
    return (s.softmax(-1) @ v).transpose(0, 1)


@given(
    st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=5),
    st.integers(1, 5),
    st.integers(0, 99),
    st.sampled_from([(4, 2, 8, 8), (2, 2, 8, 12), (3, 1, 16, 8)]),
    st.booleans(),
)
@settings(max_examples=25)
def test_members_together_are_one_rank(
    lengths: list[int], members: int, seed: int, dims: tuple[int, int, int, int], by_head: bool
) -> None:
    """Any owners, documents shorter than the group; keys at once, or head by head."""
    cu_seqlens = (0, *itertools.accumulate(lengths))
    blocks = sum(-(-length // BLOCK) for length in lengths)
    members = min(members, blocks)
    heads, kv_heads, head_dim, value_dim = dims
    generator = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(cu_seqlens[-1], *shape, generator=generator, dtype=torch.float64)
        for shape in (
            *((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim)),
            (heads, value_dim),
        )
    )
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = _naive(*leaves, cu_seqlens)
    expected.backward(dout)

    sums = [torch.zeros_like(x) for x in (q, k, v)]
    for held in slices_of(cu_seqlens, random_owners(blocks, members, seed), members):
        rows = torch.from_numpy(held.tokens_T)
        pieces = DensePieces(sequence=held, documents=len(lengths), dense=dense)
        selection = Selection.of_documents(held.local_layout, held.whole_layout)
        if by_head:
            exchange = InOneProcess(k, v)
            kernel = ExchangingKernel(exchange=exchange, sequence=held, kernel=pieces)
            keys = k[rows], v[rows]
        else:
            kernel, keys = pieces, (k, v)
        given = Inputs(
            q_THD=q[rows],
            k_TGD=keys[0],
            v_TGF=keys[1],
            selection=selection,
            softmax_scale=SCALE,
        )
        out, lse = kernel.forward(given)
        torch.testing.assert_close(out, expected[rows].detach(), rtol=0, atol=1e-12)
        dq, *dkv = kernel.backward(dout[rows], Saved(**vars(given), out_THF=out, lse_TH=lse))
        if by_head:
            dkv = torch.cat(exchange.added, 1).split([head_dim, value_dim], 2)
        sums[0][rows] += dq
        for total, part in zip(sums[1:], dkv, strict=True):
            total += part
    for total, leaf in zip(sums, leaves, strict=True):
        torch.testing.assert_close(total, leaf.grad, rtol=0, atol=1e-12)
