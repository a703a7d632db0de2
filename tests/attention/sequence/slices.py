# SPDX-License-Identifier: Apache-2.0
"""Slices of packed sequences with any owners, and attention of all members in one process."""

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from attention.cases import Case, inputs_of, on_device, saved
from hypothesis import strategies as st
from torch import Tensor

from sparsebalance_megatron.attention.api import KERNELS
from sparsebalance_megatron.attention.selection import ColumnLists, Selection
from sparsebalance_megatron.attention.sequence.exchange import ExchangingKernel
from sparsebalance_megatron.attention.sequence.slice import Part, SequenceGroup, SequenceSlice

BLOCK = 8


def random_owners(blocks: int, members: int, seed: int) -> np.ndarray:
    """Every member holds a block; how many is uneven."""
    generator = random.Random(seed)
    weights = [1 + 2 * member for member in range(members)]
    owners = [*range(members), *generator.choices(range(members), weights, k=blocks - members)]
    generator.shuffle(owners)
    return np.array(owners)


def slices_of(
    cu_seqlens: Sequence[int],
    owner_N: np.ndarray,
    members: int,
    block: int = BLOCK,
    device: str = "cpu",
) -> list[SequenceSlice]:
    """The slice of every member."""
    return [
        SequenceSlice(
            cu_seqlens=tuple(cu_seqlens),
            block_size=block,
            owner_N=owner_N,
            group=SequenceGroup(member=member, members=members),
            device=device,
        )
        for member in range(members)
    ]


@st.composite
def sliced_sequences(draw: st.DrawFn, max_members: int = 5) -> list[SequenceSlice]:
    """Ragged documents, random owners."""
    lengths = draw(st.lists(st.integers(1, 5 * BLOCK), min_size=1, max_size=5))
    blocks = sum(-(-length // BLOCK) for length in lengths)
    members = draw(st.integers(1, min(max_members, blocks)))
    owner_N = random_owners(blocks, members, draw(st.integers(0, 99)))
    return slices_of((0, *itertools.accumulate(lengths)), owner_N, members)


def local_selection(selection: Selection, held: SequenceSlice) -> Selection:
    """The lists of a slice's queries, cut out of a selection within the whole sequence."""
    row_Q = torch.from_numpy(held.tokens_T).to(held.device)
    row_Q = row_Q if selection.by_token else held.layouts.own_block_N
    columns = selection.columns
    if columns is not None:
        columns = ColumnLists(
            tokens_NGK=columns.tokens_NGK[held.layouts.own_block_N],
            counts_NG=columns.counts_NG[held.layouts.own_block_N],
        )
    return Selection(
        indices_QCK=selection.indices_QCK[row_Q],
        counts_QC=selection.counts_QC[row_Q],
        by_token=selection.by_token,
        query_layout=held.local_layout,
        kv_layout=held.whole_layout,
        own_block_N=held.layouts.own_block_N,
        columns=columns,
    )


class InOneProcess:
    """An exchange between members that are all here, head by head."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self._k, self._v = k, v

    def parts(
        self, k: Tensor, v: Tensor, selection: Selection, held: SequenceSlice
    ) -> Iterator[Part]:
        heads = zip(self._k.split(1, 1), self._v.split(1, 1), strict=True)
        for head, kv_head in enumerate(heads):
            yield *kv_head, selection.of_head(head, k.shape[1])

    def gradient(self, parts: Iterable[Tensor], dtype: torch.dtype, held: SequenceSlice) -> Tensor:
        self.added = list(parts)
        return torch.cat(self.added, 1)[held.tokens_T]


def of_members(
    case: Case, implementation: str, dtype: torch.dtype, slices: Sequence[SequenceSlice]
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv put together from all members' calls."""
    kernel = KERNELS[implementation]
    q, k, v, dout = (
        x.to(case.device, dtype) for x in (case.q_THD, case.k_TGD, case.v_TGF, case.dout_THF)
    )
    wide = torch.promote_types(dtype, torch.float32)
    out, dq, head_dims = torch.empty_like(dout), torch.empty_like(q), (k.shape[2], v.shape[2])
    lse = torch.empty(q.shape[:2], dtype=wide, device=q.device)
    dkv = torch.zeros(*k.shape[:2], sum(head_dims), dtype=wide, device=q.device)
    for on_host in slices:
        held = replace(on_host, device=case.device)
        exchange = InOneProcess(k, v)
        exchanging = ExchangingKernel(exchange=exchange, sequence=held, kernel=kernel)
        selection = local_selection(on_device(case.selection, case.device), held)
        rows = held.tokens_T
        inputs = q[rows], k[rows], v[rows]
        results = exchanging.forward(inputs_of(*inputs, selection))
        dq_local, *_ = exchanging.backward(dout[rows], saved(*inputs, *results, selection))
        out[rows], lse[rows], dq[rows] = *results, dq_local
        added = torch.cat(exchange.added, 1)
        assert added.dtype == wide
        dkv += added
    return tuple(x.cpu() for x in (out, lse, dq, *dkv.to(dtype).split(head_dims, 2)))
