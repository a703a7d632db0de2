# SPDX-License-Identifier: Apache-2.0
"""What a run asks of its samples, be they of one data set or of several."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

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


class Samples(ABC):
    """An endless order of samples, of one data set or of several.

    Attributes:
        counts: of one epoch of every data set.
        sources: the data sets that are mixed; none where there is but one.
    """

    counts: SampleCounts
    sources: tuple[SourceFacts, ...] = ()

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Samples number ``first`` to ``first + size`` of training, in order of arrival, int64.

        Training runs through epoch after epoch without a gap, so a batch may span epochs. The
        result depends on the arguments alone: resuming needs only the number of consumed samples.
        """
        if first < 0 or size < 1:
            raise ValueError(f"batch of {size} samples from {first}: need size >= 1 and first >= 0")
        return self._samples_at(first, size)

    def describe(self) -> tuple[str, ...]:
        """Lines that say what became of the documents."""
        return (self.counts.describe(),)

    @abstractmethod
    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Input tokens of each sample, int64, in the order given."""

    @abstractmethod
    def read(self, sample: int) -> Sample:
        """Tokens of a sample, and its loss mask where its data set has one.

        Raises:
            DataError: if a token is not in the vocabulary, or the mask is not one.
        """

    @abstractmethod
    def digest(self) -> str:
        """Hexadecimal SHA-256 of what order and lengths depend on; equal on ranks that agree."""

    @abstractmethod
    def _samples_at(self, first: int, size: int) -> np.ndarray:
        """Samples at the places ``first`` to ``first + size`` of the order, int64."""
