# SPDX-License-Identifier: Apache-2.0
"""Packed-sequence parameters that travel with a micro-batch: layout, budgets, observations.

Budgets are data of the micro-batch, never of "the current micro-batch": recompute and interleaved
schedules run layers of several micro-batches in turn, and each finds its own here.

Shape legend: S samples of the micro-batch, T tokens of what runs.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.sequence.earlier_segments import MicroBatchSegments
from sparsebalance_megatron.attention.sequence.heads import TravellingHeads
from sparsebalance_megatron.attention.sequence.slice import (
    SequenceExchange,
    SequenceGroup,
    SequenceSlice,
)
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

STEPS_PER_FULL_OBSERVATION = 8
"""In every such step documents are routed that are attended to densely."""


BASE, EXECUTED = -2, -1
"""Columns of observed coverage behind those of the grid's budgets: at base budgets, and at executed
ones."""


@dataclass(kw_only=True)
class LocalMicroBatch:
    """A micro-batch, or a segment of one, as a model chunk of this rank runs it.

    It is built once and travels through Megatron in :class:`BudgetedPackedSeqParams`.

    Attributes:
        layout: of the whole packed sequence; of a segment, that of the sequence so far.
        budgets_LS: on the device.
        max_budgets: each layer's largest, on the host.
        observe: whether coverage is observed, in a training step.
        observes_all: whether documents that are attended to densely are routed, too: what smaller
            budgets would cover is learnt from them.
        step: the training step; -1 outside of one.
        position: its place in the rank's order.
        sequence: the slice that runs; None where that is the whole packed sequence.
        heads_of: the ranks that divide the heads of each tensor-parallel rank among them.
        segment: number of the micro-batch's segment that runs; 0 where it has one.
        segments: shared by the segments of a micro-batch; None where it has one.
        padding_documents: the last documents, which are of no sample.
        documents: of the micro-batch, padding and those of later segments included; None where they
            are those of the layout.
        dense_documents_L: so many first of them each layer attends to densely, as the plan says;
            empty where no layer does.
        inputs: name -> values [T] on the host, which the model or the loss reads; None on stages
            that read none.
        observations: by layer, so that a recomputed pass overwrites what it repeats: coverage
            [S, K + 2], on the device until the step's end. At the grid's budgets it is NaN of
            documents that were not routed since they are attended to densely; at the base budget
            of those among them that it does not cover.
    """

    layout: PackedLayout
    budgets_LS: Tensor
    max_budgets: tuple[int, ...]
    observe: bool
    observes_all: bool = False
    step: int = -1
    position: int = 0
    chunk: int = 0
    sequence: SequenceSlice | None = None
    heads_of: SequenceGroup = field(default=SequenceGroup())
    segment: int = 0
    segments: MicroBatchSegments | None = None
    padding_documents: int = 0
    documents: int | None = None
    dense_documents_L: Sequence[int] = ()
    inputs: Mapping[str, np.ndarray] | None = None
    observations: dict[int, Tensor] = field(default_factory=dict)
    _boundaries_of: dict[int, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)
    _travelling: dict[int, TravellingHeads] = field(default_factory=dict, init=False, repr=False)

    def dense_documents(self, layer: int) -> int:
        """Number of first documents that a layer attends to densely."""
        return self.dense_documents_L[layer] if len(self.dense_documents_L) else 0

    def is_dense(self, layer: int) -> bool:
        """Whether a layer attends to all documents densely."""
        documents = self.layout.documents if self.documents is None else self.documents
        return self.dense_documents(layer) == documents

    def travelling(self, tokens: int) -> TravellingHeads:
        """The exchange of heads of the first documents, of so many tokens, where this is of a
        slice; made once for all layers."""
        assert self.sequence is not None
        if tokens not in self._travelling:
            self._travelling[tokens] = TravellingHeads(self.sequence, tokens)
        return self._travelling[tokens]

    @cached_property
    def of_member(self) -> "LocalMicroBatch":
        """The whole packed sequence with this member's heads, where this is of a slice; what is
        observed is noted here."""
        assert self.sequence is not None
        return replace(self, sequence=None, heads_of=self.sequence.group)

    def join_observations(self) -> None:
        """Where each member observed its heads, note the mean of all; collective between them."""
        group = None if self.sequence is None else self.sequence.group
        if group is None or not group.lists_by_heads or not self.observations:
            return
        seen_SK = torch.cat(list(self.observations.values()))
        torch.distributed.all_reduce(seen_SK, group=group.process_group)
        means = (seen_SK / group.members).split(self.layout.documents)
        self.observations = dict(zip(self.observations, means, strict=True))

    def observe_everything(self, layers: Sequence[int], grid_budgets: int) -> None:
        """Note that layers whose attention is the model's own read everything."""
        shape = self.layout.documents, grid_budgets + 2
        seen_SK = torch.ones(shape, device=self.budgets_LS.device)
        self.observations.update(dict.fromkeys(layers, seen_SK))

    def without(self, documents: int) -> "LocalMicroBatch":
        """The micro-batch of all but the first documents, with observations of its own."""
        sequence = None if self.sequence is None else self.sequence.without(documents)
        layout = self.layout.split(documents)[1] if sequence is None else sequence.whole_layout
        return replace(
            self,
            layout=layout,
            sequence=sequence,
            budgets_LS=self.budgets_LS[:, documents:],
            dense_documents_L=(),
            observations={},
        )

    @property
    def counts(self) -> bool:
        """Whether what is known of the documents is counted here: by the first of the ranks that
        share the sequence, and in its last segment, which has seen all of it."""
        if self.sequence is None:
            return True
        ranks = self.sequence.ranks or self.sequence.group
        is_last = self.segments is None or self.segment == self.segments.count - 1
        return is_last and ranks.member == 0

    def padding_T(self) -> Tensor | None:
        """bool, which tokens that this rank computes are padding, alike None on all ranks that
        share the sequence: where nothing can be."""
        if self.sequence is None and not self.padding_documents:
            return None
        boundaries = self.layout.cu_seqlens
        token_T = torch.arange(boundaries[-1], device=self.budgets_LS.device)
        padding_T = token_T >= boundaries[self.layout.documents - self.padding_documents]
        return padding_T if self.sequence is None else self.sequence.cut(padding_T, padding=True)

    def exchange(self, layer: int) -> SequenceExchange:
        """Exchange that brings other keys and values to a layer of a slice."""
        if self.segments is not None:
            return self.segments.of_layer(layer)
        exchange = None if self.sequence is None else self.sequence.group.exchange
        assert exchange is not None, "ranks that share a sequence have an exchange"
        return exchange

    def plain_params(self, documents: int) -> PackedSeqParams:
        """Plain parameters of the first documents of the packed sequence, in the thd layout."""
        return PackedSeqParams(qkv_format="thd", **self._boundaries(documents))

    def _boundaries(self, documents: int) -> dict[str, Any]:
        """Boundaries of the first documents, as Megatron's parameters name them; made once.

        The longest document is rounded up to a power of two: the host knows it, few kernels are
        built for it, and fused RoPE launches as many blocks for every document.
        """
        if documents in self._boundaries_of:
            return self._boundaries_of[documents]
        boundaries = self.layout.cu_seqlens[: documents + 1]
        # Made on the host first: torch.tensor(..., device=device) would wait for the device.
        host = torch.tensor(boundaries, dtype=torch.int32)
        cu_seqlens = copied_to(host, self.budgets_LS.device)
        longest = 1 << (max(np.diff(boundaries).tolist()) - 1).bit_length()
        self._boundaries_of[documents] = {
            **dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv"), cu_seqlens),
            **dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), longest),
        }
        return self._boundaries_of[documents]

    def params(self) -> "BudgetedPackedSeqParams":
        """Parameters for Megatron's attention and RoPE, in the thd layout.

        In a run that may share sequences the layout is called sbhd, with a batch of one, and the
        RoPE group is this rank alone: Megatron then applies row i of the table that
        :func:`.hooks.use_true_positions` puts in place to token i, and cuts nothing itself.
        """
        sequence = self.sequence
        return BudgetedPackedSeqParams(
            qkv_format="thd" if sequence is None else "sbhd",
            cp_group=None if sequence is None else sequence.group.alone,
            micro_batch=self,
            **self._boundaries(self.layout.documents),
        )


@dataclass
class BudgetedPackedSeqParams(PackedSeqParams):
    """Megatron's ``PackedSeqParams`` with the micro-batch on board."""

    micro_batch: LocalMicroBatch | None = None


def local_micro_batches(
    plan: MicroBatchPlan,
    cu_seqlens: tuple[int, ...],
    slices: Sequence[SequenceSlice | None],
    *,
    block_size: int,
    observe: bool,
    device: torch.device,
    step: int = -1,
    chunk: int = 0,
    inputs: Sequence[Mapping[str, np.ndarray]] | None = None,
) -> list[LocalMicroBatch]:
    """Build a planned micro-batch on this rank, segment by segment.

    A padded sequence has more documents than the plan has samples; padding gets budget 1, since
    nothing it computes reaches the loss.

    Args:
        cu_seqlens: boundaries of the whole packed sequence, padding included.
        slices: what runs, on the host; a single None is the whole packed sequence.
        inputs: of each slice; None on stages that read none.
    """
    samples, documents = len(plan.samples), len(cu_seqlens) - 1
    padding = documents - samples
    on_host_LS = np.pad(plan.budgets_LS, ((0, 0), (0, padding)), constant_values=1)
    budgets_LS = torch.as_tensor(on_host_LS, dtype=torch.int32)
    # Padding behind dense documents needs no lists of its own.
    dense_L = [documents if n == samples else n for n in plan.dense_documents_L.tolist()]
    segments, ranks = None, slices[0].ranks if slices[0] is not None else None
    if ranks is not None:
        segments = MicroBatchSegments(count=len(slices), exchange=ranks.exchange)
    max_budgets = tuple(int(k) for k in plan.budgets_LS.max(axis=1))
    made = []
    for number, held in enumerate(slices):
        # Of a segment, the documents that have begun.
        begun = len(cu_seqlens if held is None or segments is None else held.cu_seqlens) - 1
        sequence = None if held is None else replace(held, device=device)
        made.append(
            LocalMicroBatch(
                layout=packed_layout(cu_seqlens, block_size, device)
                if sequence is None
                else sequence.whole_layout,
                budgets_LS=copied_to(budgets_LS[:, :begun].contiguous(), device),
                max_budgets=max_budgets,
                observe=observe,
                observes_all=observe and step % STEPS_PER_FULL_OBSERVATION == 0,
                step=step,
                position=plan.position,
                chunk=chunk,
                sequence=sequence,
                segment=number,
                segments=segments,
                padding_documents=padding,
                documents=documents,
                dense_documents_L=dense_L,
                inputs=None if inputs is None else inputs[number],
            )
        )
    return made


class LayoutCache:
    """The last packed sequence's boundaries and layout, shared by the layers of a model.

    Layers of a micro-batch get the same boundary tensor from Megatron. Reading it makes the host
    wait for the device, so it is read anew only where it is another tensor, or was written to.
    """

    def __init__(self) -> None:
        self._read: tuple[weakref.ref[Tensor], int, tuple[int, ...]] | None = None
        self.layout = lru_cache(maxsize=1)(packed_layout)

    def boundaries_of(self, cu_seqlens: Tensor) -> tuple[int, ...]:
        """The boundaries in a tensor on any device."""
        if cu_seqlens.is_inference():
            # Such tensors do not count what is written to them.
            return tuple(cu_seqlens.tolist())
        if self._read is not None:
            tensor, version, boundaries = self._read
            if tensor() is cu_seqlens and version == cu_seqlens._version:
                return boundaries
        boundaries = tuple(cu_seqlens.tolist())
        self._read = weakref.ref(cu_seqlens), cu_seqlens._version, boundaries
        return boundaries
