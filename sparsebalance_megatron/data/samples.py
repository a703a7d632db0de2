# SPDX-License-Identifier: Apache-2.0
"""The sample index: which samples a data set has, how long they are, in which order they come.

Lengths follow from the ``.idx`` file alone; a token is read only when a sample is.
A sample of n input tokens takes n + 1 stored tokens: inputs are the first n, labels the last n.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import astuple
from pathlib import Path
from typing import Literal, get_args

import numpy as np

from sparsebalance_megatron.config import Overlong
from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.packing import Sample
from sparsebalance_megatron.data.sample_order import SampleCounts, Samples
from sparsebalance_megatron.data.stored_values import check_mask, check_tokens
from sparsebalance_megatron.errors import DataError

Split = Literal["train", "valid", "test"]

_EPOCHS_KEPT = 2
"""A global batch may begin in one epoch and end in the next."""

_SPOTS, _SPOT_TOKENS = 64, 64
"""Documents, and tokens of each, that a digest looks at."""


class SampleIndex(Samples):
    """The samples of one split of one data set, and their order in every epoch.

    Samples are numbered by document, then by piece. An overlong document that is split yields
    pieces of ``max_tokens`` inputs that share their boundary token: every prediction is kept once.

    Args:
        documents: the stored documents.
        document_range: (first, end) documents of the split.
        max_tokens: input tokens of the longest sample (Megatron's ``--seq-length``).
        overlong: what happens to documents of more than ``max_tokens`` + 1 tokens.
        seed: of the order; together with the epoch it determines the permutation.
        vocab_size: rows of the model's embedding, which no stored token may exceed; None leaves
            tokens unchecked.

    Raises:
        DataError: if no sample is left, or what is stored is not for this model.
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
        self._orders: dict[int, np.ndarray] = {}
        self.counts = _count(self._lengths_tokens, predictions, pieces, max_tokens)
        if self.counts.samples == 0:
            raise DataError(
                f"{documents.prefix}: no sample left of {self.counts.documents} documents "
                f"({self.counts.dropped_documents} shorter than 2 tokens or dropped as longer than "
                f"{max_tokens}); use longer documents, a longer sequence length, or "
                "--sparse-balance-overlong split"
            )

    @classmethod
    def open(
        cls,
        prefix: str | Path,
        *,
        max_tokens: int,
        overlong: Overlong,
        seed: int,
        split_weights: str = "100,0,0",
        split: Split = "train",
        vocab_size: int | None = None,
    ) -> SampleIndex | None:
        """Open one split of a data set; None if not a single document falls into it.

        Args:
            prefix: of the ``.bin`` and ``.idx`` files.
            split_weights: Megatron's ``--split``: weights of train, valid, test over documents.
            split: which of the three.
            vocab_size: rows of the model's embedding; None leaves tokens unchecked.

        Raises:
            DataError: if a file is missing or damaged, the weights are wrong, or documents of the
                split exist but yield no sample.
        """
        documents = Documents.open(prefix)
        document_range = split_range(len(documents), split_weights, split)
        if document_range[0] == document_range[1]:
            return None
        return cls(
            documents,
            document_range,
            max_tokens=max_tokens,
            overlong=overlong,
            seed=seed,
            vocab_size=vocab_size,
        )

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self.counts.samples

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        documents, offsets = self._locate(np.asarray(samples, dtype=np.int64))
        return np.minimum(self._max_tokens, self._lengths_tokens[documents] - 1 - offsets)

    def _samples_at(self, first: int, size: int) -> np.ndarray:
        return self.samples_at(np.arange(first, first + size))

    def samples_at(self, places: np.ndarray) -> np.ndarray:
        """Samples at the given places of the endless order, int64; places must not fall."""
        epochs, within = np.divmod(places, len(self))
        return np.concatenate(
            [
                np.empty(0, dtype=np.int64),
                *(self._order(int(epoch))[within[epochs == epoch]] for epoch in np.unique(epochs)),
            ]
        )

    @property
    def has_loss_mask(self) -> bool:
        """Whether some labels are not trained on."""
        return self._documents.loss_mask is not None

    def read(self, sample: int) -> Sample:
        local_document, offset = (int(value[0]) for value in self._locate(np.asarray([sample])))
        length_tokens = int(self.lengths_of(np.asarray([sample]))[0])
        document = self._first_document + local_document
        tokens = self._documents.read_tokens(document, offset, length_tokens + 1)
        mask = self._documents.read_loss_mask(document, offset + 1, length_tokens)
        place = f"{self._documents.prefix}, document {document}"
        if self._vocab_size is not None:
            check_tokens(tokens, self._vocab_size, place)
        if mask is not None:
            check_mask(mask, f"{place}, loss mask")
        return Sample(
            tokens=tokens,
            loss_mask=None if mask is None else mask.astype(np.float32),
        )

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
            tokens = self._documents.read_tokens(document, 0, length)
            digest.update(tokens.astype("<i8").tobytes())
        return digest.hexdigest()

    def _locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Document within the split, and offset of the first input token in it, per sample."""
        if samples.size and not 0 <= samples.min() <= samples.max() < len(self):
            raise IndexError(f"sample number outside 0 to {len(self) - 1}")
        documents = np.searchsorted(self._sample_ends, samples, side="right")
        first_samples = np.where(documents > 0, self._sample_ends[documents - 1], 0)
        return documents, (samples - first_samples) * self._max_tokens

    def _order(self, epoch: int) -> np.ndarray:
        """The permutation of an epoch."""
        if epoch not in self._orders:
            while len(self._orders) >= _EPOCHS_KEPT:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = epoch_permutation(len(self), self._seed, epoch)
        return self._orders[epoch]


def epoch_permutation(samples: int, seed: int, epoch: int) -> np.ndarray:
    """Permutation of ``range(samples)``, int64, a function of the arguments alone.

    Sorts raw Philox output: numpy promises that stream for all versions, which it does not promise
    for ``Generator.permutation``. So a run resumed under another numpy keeps its order.
    """
    stream = np.random.Philox(np.random.SeedSequence([seed, epoch]))
    return np.argsort(stream.random_raw(samples), kind="stable")


def split_range(documents: int, weights: str, split: Split) -> tuple[int, int]:
    """(first, end) documents of a split; contiguous ranges cut where Megatron cuts them.

    Same rule as ``parse_and_normalize_split`` and ``_build_megatron_dataset_splits`` in
    ``megatron.core.datasets``: cumulated normalised weights times documents, rounded.

    Raises:
        DataError: if ``weights`` is not one to three non-negative numbers, one of them positive.
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
    """Samples per document, int64."""
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
