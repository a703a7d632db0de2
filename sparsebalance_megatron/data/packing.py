# SPDX-License-Identifier: Apache-2.0
"""Packing: samples, one after another, into one sequence without a batch dimension (THD).

Shape legend: n input tokens of a sample, T tokens of the packed sequence or of a part of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample as stored: ``tokens[:n]`` are inputs, ``tokens[1:]`` are labels.

    ``tokens``: [n + 1], any integer dtype. ``loss_mask``: [n], one weight per label, or None where
    every label counts.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None = None

    @property
    def length_tokens(self) -> int:
        return len(self.tokens) - 1


@dataclass(frozen=True, kw_only=True)
class PackedSequence:
    """Samples in one sequence, whose boundaries :func:`packed_cu_seqlens` gives.

    ``tokens``, ``labels`` (the token that follows each input) and ``position_ids`` (from 0 in every
    sample and in the padding) are [T] int64; ``loss_mask`` is [T] float32, 0 on padding and on
    labels that a sample masks.
    """

    tokens: np.ndarray
    labels: np.ndarray
    position_ids: np.ndarray
    loss_mask: np.ndarray

    def part(self, tokens: np.ndarray, *, padding_tokens: int = 0) -> "PackedSequence":
        """The tokens at the given places, with their labels in the whole sequence, and padding
        behind them."""
        padding = (0, padding_tokens)
        parts = {name: np.pad(values[tokens], padding) for name, values in vars(self).items()}
        return PackedSequence(**parts)


def packed_cu_seqlens(
    lengths_tokens: Sequence[int], pad_to_multiple_of: int = 1, padding_documents: int = 0
) -> tuple[int, ...]:
    """Boundaries of a packed sequence, from the lengths of its samples, of which there are some.

    Padding is a sequence of its own, so that no sample's attention, position or budget depends on
    it; Megatron's ``PackedSeqParams.cu_seqlens_q`` takes these numbers. ``padding_documents``, of
    one token each, lie behind the samples: every rank that shares a sequence needs some.
    """
    if not lengths_tokens or min(lengths_tokens) < 1:
        raise ValueError(
            f"a packed sequence needs samples of at least 1 token, got {list(lengths_tokens)}"
        )
    lengths = [*map(int, lengths_tokens), *[1] * padding_documents]
    boundaries = [0, *accumulate(lengths)]
    if padding := -boundaries[-1] % pad_to_multiple_of:
        boundaries.append(boundaries[-1] + padding)
    return tuple(boundaries)


def pack(samples: Sequence[Sample], cu_seqlens: Sequence[int]) -> PackedSequence:
    """Pack samples in the order given, to the boundaries that :func:`packed_cu_seqlens` gives.

    Inputs, labels and loss weights of padding are 0.
    """
    packed_tokens = cu_seqlens[-1]
    tokens = np.zeros(packed_tokens, dtype=np.int64)
    labels = np.zeros(packed_tokens, dtype=np.int64)
    loss_mask = np.zeros(packed_tokens, dtype=np.float32)
    for sample, (start, end) in zip(samples, pairwise(cu_seqlens), strict=False):
        place = slice(start, end)
        tokens[place] = sample.tokens[:-1]
        labels[place] = sample.tokens[1:]
        loss_mask[place] = 1.0 if sample.loss_mask is None else sample.loss_mask
    sequence_starts = np.repeat(cu_seqlens[:-1], np.diff(cu_seqlens))
    return PackedSequence(
        tokens=tokens,
        labels=labels,
        position_ids=np.arange(packed_tokens, dtype=np.int64) - sequence_starts,
        loss_mask=loss_mask,
    )
