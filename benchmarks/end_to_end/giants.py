# SPDX-License-Identifier: Apache-2.0
"""A data set each of whose global batches holds one giant document.

Samples come in an order that follows from their number and the seed alone, so documents can be
stored such that every global batch of the first epoch gets its giant.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sparsebalance_megatron.data.data_set import epoch_permutation
from sparsebalance_megatron.data.documents import DatasetWriter, Documents

SHORTEST, LONGEST = 64, 16
"""The other documents have a sequence length over these of tokens, evenly spread in between. With
seven of average length beside it, a giant has 6.3 times the mean tokens of its batch; with seven of
the longest 5.6 times."""


def lengths_with_giants(
    batches: int, *, batch_size: int, seq_length: int, seed: int
) -> tuple[int, ...]:
    """Input tokens of the documents, as they are to be stored; a giant has ``seq_length``.

    Args:
        batches: global batches of the one epoch.
        batch_size: documents of each.
        seed: of the order that training takes samples in.
    """
    documents = batches * batch_size
    raw = np.random.Philox(np.random.SeedSequence([seed, documents])).random_raw(documents)
    share = (raw >> np.uint64(11)) / 2.0**53
    shortest, longest = max(1, seq_length // SHORTEST), max(1, seq_length // LONGEST)
    in_order = shortest + (share * (longest + 1 - shortest)).astype(np.int64)
    # Not always the first of a batch: order of arrival is to mean nothing.
    places = np.arange(batches) % batch_size
    in_order[np.arange(batches) * batch_size + places] = seq_length
    stored = np.empty(documents, dtype=np.int64)
    stored[epoch_permutation(documents, seed, epoch=0)] = in_order
    return tuple(stored.tolist())


def write_with_giants(source: Path, prefix: Path, lengths_tokens: tuple[int, ...]) -> Path:
    """Store documents of these lengths, cut one after the other out of another data set's tokens.

    Args:
        source: prefix of the other data set, which is begun again where it ends.
        prefix: of the one to write; an older one is replaced.

    Returns:
        ``prefix``.
    """
    documents = Documents.open(source)
    prefix.parent.mkdir(parents=True, exist_ok=True)
    most = max(
        int(documents.read_tokens(number, 0, int(length)).max())
        for number, length in enumerate(documents.lengths_tokens)
        if length
    )
    stream = _endless(documents)
    left = np.empty(0, dtype=np.int64)
    with DatasetWriter(str(prefix), vocab_size=most + 1, overwrite=True) as writer:
        for length in lengths_tokens:
            while len(left) < length + 1:
                left = np.concatenate([left, next(stream)])
            writer.add(left[: length + 1], np.ones(length + 1, dtype=np.uint8))
            left = left[length + 1 :]
        writer.commit("{}\n")
    return prefix


def _endless(documents: Documents) -> Iterator[np.ndarray]:
    while True:
        for number, length in enumerate(documents.lengths_tokens.tolist()):
            yield documents.read_tokens(number, 0, length).astype(np.int64)
