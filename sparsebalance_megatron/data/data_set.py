# SPDX-License-Identifier: Apache-2.0
"""The samples of one data set: which there are, how long they are, in which order they come.

Lengths follow from the ``.idx`` file alone; a token is read only when a sample is.
A sample of n input tokens takes n + 1 stored tokens: inputs are the first n, labels the last n.
"""

import hashlib
import re
from dataclasses import astuple, dataclass
from functools import cached_property, lru_cache, partial
from typing import Literal, get_args

import numpy as np

from sparsebalance_megatron.config import Overlong
from sparsebalance_megatron.data.documents import Documents, check_mask, check_tokens
from sparsebalance_megatron.data.packing import Sample
from sparsebalance_megatron.errors import DataError

Split = Literal["train", "valid", "test"]

_EPOCHS_KEPT = 2
"""A global batch may begin in one epoch and end in the next."""

_SPOTS, _SPOT_TOKENS = 64, 64
"""Documents, and tokens of each, that a digest looks at."""


@dataclass(frozen=True, kw_only=True)
class SampleCounts:
    """Counts of a split's documents and samples. Tokens are stored tokens unless said otherwise.

    Nothing is lost uncounted: all stored tokens = ``tokens`` + one per document kept (its first
    token is never a label) + ``truncated_tokens`` + ``dropped_tokens``. ``samples`` and ``tokens``,
    input tokens, are of one epoch. Dropped documents are below 2 tokens, or overlong.
    """

    documents: int
    samples: int
    tokens: int
    dropped_documents: int
    dropped_tokens: int
    truncated_tokens: int
    split_documents: int

    def __add__(self, other: "SampleCounts") -> "SampleCounts":
        return SampleCounts(**{name: n + getattr(other, name) for name, n in vars(self).items()})

    def describe(self) -> str:
        return (
            f"{self.documents:,} documents gave {self.samples:,} samples of {self.tokens:,} "
            f"tokens; {self.split_documents:,} overlong documents split, "
            f"{self.truncated_tokens:,} tokens truncated, {self.dropped_documents:,} documents "
            f"({self.dropped_tokens:,} tokens) dropped"
        )


class DataSet:
    """The samples of one split of one data set, and their order in every epoch.

    Samples are numbered by document, then by piece. An overlong document that is split yields
    pieces of ``max_tokens`` inputs that share their boundary token: every prediction is kept once.

    Args:
        document_range: (first, end) documents of the split.
        max_tokens: input tokens of the longest sample (Megatron's ``--seq-length``).
        overlong: what happens to documents of more than ``max_tokens`` + 1 tokens.
        vocab_size: rows of the model's embedding; None leaves tokens unchecked.
    """

    def __init__(
        self,
        documents: Documents,
        document_range: tuple[int, int],
        *,
        max_tokens: int,
        overlong: Overlong,
        seed: int,
        vocab_size: int | None = None,
    ) -> None:
        if vocab_size is not None:
            documents.check_values(vocab_size)
        self.prefix = documents.prefix
        self._vocab_size = vocab_size
        self._documents = documents
        self._first_document, end_document = document_range
        self._lengths_tokens = documents.lengths_tokens[self._first_document : end_document]
        self._max_tokens = max_tokens
        self._overlong = overlong
        self._seed = seed
        predictions = np.maximum(self._lengths_tokens - 1, 0)
        pieces = _pieces(predictions, max_tokens, overlong)
        self._sample_ends = np.cumsum(pieces)
        self.counts = _count(self._lengths_tokens, predictions, pieces, max_tokens)
        if self.counts.samples == 0:
            raise DataError(
                f"{documents.prefix}: no sample left of {self.counts.documents} documents "
                f"({self.counts.dropped_documents} shorter than 2 tokens or dropped as longer than "
                f"{max_tokens}); use longer documents, a longer sequence length, or "
                "--sparse-balance-overlong split"
            )
        order = partial(epoch_permutation, self.counts.samples, seed)
        self._order_of_epoch = lru_cache(maxsize=_EPOCHS_KEPT)(order)

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        return self._locate(samples)[2]

    def samples_at(self, places: np.ndarray) -> np.ndarray:
        """Samples at the given places of the endless order, int64; places must not fall."""
        epochs, within = np.divmod(places, self.counts.samples)
        return np.concatenate(
            [
                np.empty(0, dtype=np.int64),
                *(
                    self._order_of_epoch(int(epoch))[within[epochs == epoch]]
                    for epoch in np.unique(epochs)
                ),
            ]
        )

    @property
    def has_loss_mask(self) -> bool:
        return self._documents.loss_mask is not None

    def read(self, sample: int) -> Sample:
        local_document, offset, length_tokens = map(int, self._locate(np.asarray(sample)))
        document = self._first_document + local_document
        stored, place = self._documents, f"{self.prefix}, document {document}"
        tokens = stored.tokens[stored.place(document, offset, length_tokens + 1)]
        if self._vocab_size is not None:
            check_tokens(tokens, self._vocab_size, place)
        if stored.loss_mask is None:
            return Sample(tokens=tokens)
        mask = stored.loss_mask[stored.place(document, offset + 1, length_tokens)]
        check_mask(mask, f"{place}, loss mask")
        return Sample(tokens=tokens, loss_mask=mask.astype(np.float32))

    @cached_property
    def digest(self) -> str:
        # Tokens are looked at in places only: in documents spread evenly over the split.
        digest = hashlib.sha256(
            f"{self._first_document}:{self._max_tokens}:{self._overlong}:{self._seed}:"
            f"{astuple(self.counts)}:{self._documents.loss_mask is not None}:".encode()
        )
        digest.update(np.ascontiguousarray(self._lengths_tokens, dtype="<i8").tobytes())
        for local_document in np.unique(np.linspace(0, self.counts.documents - 1, _SPOTS).round()):
            length = min(int(self._lengths_tokens[int(local_document)]), _SPOT_TOKENS)
            document = self._first_document + int(local_document)
            tokens = self._documents.tokens[self._documents.place(document, 0, length)]
            digest.update(tokens.astype("<i8").tobytes())
        return digest.hexdigest()

    def _locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Document within the split, offset of the first input token in it, and input tokens, per
        sample."""
        if samples.size and not 0 <= samples.min() <= samples.max() < self.counts.samples:
            raise IndexError(f"sample number outside 0 to {self.counts.samples - 1}")
        documents = np.searchsorted(self._sample_ends, samples, side="right")
        first_samples = np.where(documents > 0, self._sample_ends[documents - 1], 0)
        offsets = (samples - first_samples) * self._max_tokens
        left_tokens = self._lengths_tokens[documents] - 1 - offsets
        return documents, offsets, np.minimum(self._max_tokens, left_tokens)


def epoch_permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Permutation of ``range(samples)``, int64.

    Sorts raw Philox output, a stream that numpy promises for all versions: a run resumed under
    another numpy keeps its order.
    """
    stream = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    return np.argsort(stream.random_raw(samples), kind="stable")


def split_range(documents: int, weights: str, split: Split) -> tuple[int, int]:
    """(first, end) documents of a split; contiguous ranges cut where Megatron cuts them.

    Same rule as ``_build_megatron_dataset_splits`` in ``megatron.core.datasets``: cumulated
    normalised weights times documents, rounded.
    """
    number = r"\s*(\d+\.?\d*|\.\d+)\s*"
    if not re.fullmatch(rf"{number}(,{number}){{0,2}}", weights):
        raise DataError(f"--split {weights}: must be up to three weights, such as 99,1,0")
    numbers = [float(number) for number in weights.split(",")]
    if sum(numbers) == 0:
        raise DataError(f"--split {weights}: one weight must be positive, such as 99,1,0")
    numbers += [0.0] * (3 - len(numbers))
    bookends = np.cumsum([0.0, *(number / sum(numbers) for number in numbers)])
    position = get_args(Split).index(split)
    first, end = (
        round(float(bookend) * documents) for bookend in bookends[position : position + 2]
    )
    return (first, end) if numbers[position] > 0 else (first, first)


def _pieces(predictions: np.ndarray, max_tokens: int, overlong: Overlong) -> np.ndarray:
    if overlong == "split":
        return -(-predictions // max_tokens)
    if overlong == "truncate":
        return (predictions > 0).astype(np.int64)
    return ((predictions > 0) & (predictions <= max_tokens)).astype(np.int64)


def _count(
    lengths_tokens: np.ndarray, predictions: np.ndarray, pieces: np.ndarray, max_tokens: int
) -> SampleCounts:
    kept_tokens = np.minimum(predictions, pieces * max_tokens)
    dropped = pieces == 0
    return SampleCounts(
        documents=len(lengths_tokens),
        samples=int(pieces.sum()),
        tokens=int(kept_tokens.sum()),
        dropped_documents=int(dropped.sum()),
        dropped_tokens=int(lengths_tokens[dropped].sum()),
        truncated_tokens=int((predictions - kept_tokens)[~dropped].sum()),
        split_documents=int((pieces > 1).sum()),
    )
