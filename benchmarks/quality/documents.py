# SPDX-License-Identifier: Apache-2.0
"""Documents whose answers are known: what tasks generate, train on and are scored by."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsebalance_megatron.data.documents import DatasetWriter
from sparsebalance_megatron.data.packing import Sample


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document of n inputs.

    Attributes:
        tokens: [n + 1] token ids; inputs are the first n, labels the last n.
        scored: [n] bool, which labels count.
        places: [n] what a label is grouped by in the results: the distance in tokens to what
            answers it, the needle's depth in tenths, or the position in the document.
    """

    tokens: np.ndarray
    scored: np.ndarray
    places: np.ndarray

    @property
    def sample(self) -> Sample:
        """As the plugin packs it."""
        return Sample(tokens=self.tokens, loss_mask=self.scored.astype(np.float32))


def write_documents(prefix: Path, documents: Iterable[Document], *, vocabulary: int) -> None:
    """Write Megatron's ``.bin`` and ``.idx``, with the loss masks beside them."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    with DatasetWriter(str(prefix), vocab_size=vocabulary) as writer:
        for document in documents:
            # A mask has an entry for the first token too, which is never a label.
            writer.add(document.tokens, np.concatenate([[0], document.scored]).astype(np.uint8))
        writer.commit("{}\n")


def log_uniform_length(
    generator: np.random.Generator, shortest_tokens: int, longest_tokens: int
) -> int:
    """Tokens of a document: as many below as above the geometric mean of the bounds."""
    low, high = np.log(shortest_tokens), np.log(longest_tokens + 1)
    return min(int(np.exp(generator.uniform(low, high))), longest_tokens)
