# SPDX-License-Identifier: Apache-2.0
"""What a run asks of its samples, be they of one data set or of several."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from sparsebalance_megatron.data.packing import Sample


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """What became of a split's documents. Tokens are stored tokens unless said otherwise.

    Nothing is lost uncounted: all stored tokens = ``tokens`` + one per document kept (its first
    token is never a label) + ``truncated_tokens`` + ``dropped_tokens``.

    Attributes:
        documents: documents of the split.
        samples: samples of one epoch.
        tokens: input tokens of one epoch, as many as predictions.
        dropped_documents: documents without a sample: below 2 tokens, or overlong and dropped.
        dropped_tokens: tokens of those documents.
        truncated_tokens: tokens cut off the ends of overlong documents.
        split_documents: overlong documents that became several samples.
    """

    documents: int
    samples: int
    tokens: int
    dropped_documents: int
    dropped_tokens: int
    truncated_tokens: int
    split_documents: int

    def __add__(self, other: SampleCounts) -> SampleCounts:
        """Counts of two data sets together."""
        return SampleCounts(
            **{
                field.name: getattr(self, field.name) + getattr(other, field.name)
                for field in fields(self)
            }
        )

    def describe(self) -> str:
        """All of it in one line."""
        return (
            f"{self.documents:,} documents gave {self.samples:,} samples of {self.tokens:,} "
            f"tokens; {self.split_documents:,} overlong documents split, "
            f"{self.truncated_tokens:,} tokens truncated, {self.dropped_documents:,} documents "
            f"({self.dropped_tokens:,} tokens) dropped"
        )


@dataclass(frozen=True, kw_only=True)
class SourceFacts:
    """One of several data sets that a run mixes.

    Attributes:
        prefix: of its files.
        weight: its share of the samples; all shares add up to 1.
        counts: what became of its documents.
        digest: of what its order and lengths depend on.
    """

    prefix: str
    weight: float
    counts: SampleCounts
    digest: str


class Samples(Protocol):
    """An endless order of samples, of one data set or of several.

    ``counts`` is of one epoch of every data set.
    """

    counts: SampleCounts

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Input tokens of each sample, int64, in the order given."""

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Samples at the places ``first`` to ``first + size`` of the order, int64."""

    def read(self, sample: int) -> Sample:
        """Tokens of a sample, and its loss mask where its data set has one."""

    def digest(self) -> str:
        """Hexadecimal SHA-256 of what order and lengths depend on; equal on ranks that agree."""

    @property
    def sources(self) -> tuple[SourceFacts, ...]:
        """The data sets that are mixed; none where there is but one."""

    def describe(self) -> tuple[str, ...]:
        """Lines that say what became of the documents."""
