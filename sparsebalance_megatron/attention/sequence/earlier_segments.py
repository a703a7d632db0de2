# SPDX-License-Identifier: Apache-2.0
"""Keys and values of earlier segments, kept on the stage until their own backward.

A micro-batch may pass the pipeline in segments, which are cut at whole blocks, forward in order and
backward in reverse order. Everything here is about the sequence so far: the tokens up to the end of
a segment, which are all that its queries may read.

Shape legend: T tokens of a segment or of the sequence so far, on this rank, E both side by side, S
documents that have begun, K budgets up to the most blocks of a document so far.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.kernels.contract import wide_dtype
from sparsebalance_megatron.attention.layout import block_grid
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.sequence.slice import (
    Part,
    SequenceExchange,
    SequenceGroup,
    SequenceSlice,
    dealt_owners,
)


def segment_slice(
    cu_seqlens: Sequence[int],
    segment_starts_blocks: Sequence[int],
    segment: int,
    *,
    block_size: int,
    ranks: SequenceGroup | None = None,
    in_halves: bool = False,
    pad_to_multiple_of: int = 1,
    device: torch.device | str = "cpu",
) -> SequenceSlice:
    """What this rank holds of a segment, as a slice of the sequence so far.

    Budgets and coverage are those of the documents that have begun. To ranks that share the
    sequence each segment is dealt out as in :meth:`.slice.SequenceSlice.dealt`.

    Args:
        cu_seqlens: document boundaries of the whole sequence in tokens, S + 1 entries from 0.
        segment_starts_blocks: the first block of every segment, from 0, strictly increasing.
        ranks: that share the sequence; None where this rank is alone.

    Raises:
        ValueError: the sequence cannot be cut (:func:`..layout.block_grid`), or a segment would
            have no block for a rank.
    """
    ranks = ranks or SequenceGroup()
    grid = block_grid(cu_seqlens, block_size)
    bounds = np.asarray([*segment_starts_blocks, len(grid.start_N)], dtype=np.int64)
    if bounds[0] != 0 or (np.diff(bounds) < 1).any():
        raise ValueError(
            f"segments begin at blocks {list(segment_starts_blocks)} of {len(grid.start_N)}: must "
            "begin at 0, and increase to less than the number of blocks"
        )
    last_block = bounds[segment + 1] - 1
    end = grid.start_N[last_block] + grid.length_N[last_block]
    begun = grid.boundaries[grid.boundaries < end].tolist()
    owners = [
        number * ranks.members
        + dealt_owners(grid, slice(first, last), ranks.members, in_halves=in_halves)
        for number, (first, last) in enumerate(pairwise(bounds[: segment + 2].tolist()))
    ]
    return SequenceSlice(
        cu_seqlens=(*begun, int(end)),
        block_size=block_size,
        owner_N=np.concatenate(owners),
        group=SequenceGroup(
            member=segment * ranks.members + ranks.member,
            members=(segment + 1) * ranks.members,
            alone=ranks.alone,
        ),
        ranks=ranks,
        pad_to_multiple_of=pad_to_multiple_of,
        device=device,
    )


class EarlierSegments:
    """Keys and values that one layer keeps of one micro-batch's segments: a ``SequenceExchange``.

    Its slices are those of :func:`segment_slice`. A segment's keys, values and summaries are kept
    from its forward to its backward. A backward adds the gradients that later segments have sent,
    in float32 (float64 for float64 inputs), and sends those of earlier segments on; nothing is left
    after the backward of the first segment. A forward may be run again before its backward, as
    recomputation does. Segments that run out of order are refused by a ValueError.

    Args:
        exchange: between the ranks that share the micro-batch, to which all that this rank holds
            of the sequence so far is one slice; None where it is alone.
    """

    def __init__(self, exchange: SequenceExchange | None = None) -> None:
        self._exchange = exchange
        # By segment; each mass is the sum up to its segment.
        self._keys_and_values: list[list[Tensor]] = []
        self._summaries: list[list[Tensor]] = []
        self._masses: list[list[Tensor]] = []
        self._sent_TGE: Tensor | None = None

    def parts(
        self, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, sequence: SequenceSlice
    ) -> Iterator[Part]:
        """Give the keys and values of the sequence so far, in the parts of the exchange."""
        # Without their graph, which would keep the activations behind them. Where a layer will be
        # recomputed there is none, and they may be views of all that the layer projected.
        own = [x.detach() if x.requires_grad else x.clone() for x in (k_TGD, v_TGF)]
        k_all_TGD, v_all_TGF = _with_earlier(self._keys_and_values, own, sequence)
        if self._exchange is None:
            yield k_all_TGD, v_all_TGF, selection
        else:
            yield from self._exchange.parts(k_all_TGD, v_all_TGF, selection, sequence.by_rank)

    def gradient(
        self, parts: Iterable[Tensor], dtype: torch.dtype, sequence: SequenceSlice
    ) -> Tensor:
        """Sum the gradients of a segment's tokens, later segments' included, pass those of earlier
        tokens on, and let go of what is kept of the segment."""
        segment, tokens = sequence.segment, len(sequence.tokens_T)
        if len(self._keys_and_values) > segment + 1:
            raise ValueError(
                f"backward of segment {segment} before that of segment "
                f"{len(self._keys_and_values) - 1}: must run in reverse order"
            )
        if self._exchange is None:
            (so_far_TGE,) = parts
        else:
            # Sums go on from segment to segment, and stay wide.
            so_far_TGE = self._exchange.gradient(parts, wide_dtype(dtype), sequence.by_rank)
        if self._sent_TGE is not None:
            so_far_TGE += self._sent_TGE
        for kept in (self._keys_and_values, self._summaries, self._masses):
            del kept[segment:]
        self._sent_TGE = so_far_TGE[:-tokens] if segment else None
        return so_far_TGE[-tokens:]

    @torch.no_grad()
    def summaries(self, own: Sequence[Tensor], sequence: SequenceSlice) -> list[Tensor]:
        """See :meth:`.slice.SequenceExchange.summaries`; of the blocks so far."""
        held = _with_earlier(self._summaries, list(own), sequence)
        return held if self._exchange is None else self._exchange.summaries(held, sequence.by_rank)

    @torch.no_grad()
    def total_mass(self, mass_SK: Tensor, sequence: SequenceSlice) -> Tensor:
        """Add what earlier segments' queries found, in the order of the segments."""
        segment = sequence.segment
        _check_order(self._masses, segment)
        if self._exchange is not None:
            mass_SK = self._exchange.total_mass(mass_SK, sequence.by_rank)
        if segment:
            (before_SK,) = self._masses[segment - 1]
            missing = [have - had for have, had in zip(mass_SK.shape, before_SK.shape, strict=True)]
            mass_SK = pad(before_SK, (0, missing[1], 0, missing[0])) + mass_SK
        self._masses[segment:] = [[mass_SK]]
        return mass_SK


@dataclass(frozen=True, kw_only=True)
class MicroBatchSegments:
    """State that a stage keeps of one micro-batch of ``count`` segments: an exchange for each
    layer, over the one between the ranks that share the micro-batch."""

    count: int
    exchange: SequenceExchange | None = None
    by_layer: dict[int, EarlierSegments] = field(default_factory=dict)

    def of_layer(self, layer: int) -> EarlierSegments:
        return self.by_layer.setdefault(layer, EarlierSegments(self.exchange))


def _with_earlier(
    kept: list[list[Tensor]], own: list[Tensor], sequence: SequenceSlice
) -> list[Tensor]:
    """Keep a segment's tensors, and put them behind those of the earlier segments."""
    segment = sequence.segment
    _check_order(kept, segment)
    kept[segment:] = [own]
    return own if segment == 0 else [torch.cat(each) for each in zip(*kept, strict=True)]


def _check_order(kept: list[list[Tensor]], segment: int) -> None:
    if len(kept) < segment:
        raise ValueError(
            f"forward of segment {segment} before that of segment {len(kept)}: must run in order"
        )
