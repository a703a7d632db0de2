# SPDX-License-Identifier: Apache-2.0
"""Real ``.bin`` and ``.idx`` files, written by Megatron's own builder."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

WriteDataset = Callable[..., Path]


@pytest.fixture(scope="session")
def write_dataset() -> WriteDataset:
    """Writes documents, given as token lists, under a prefix and returns the prefix.

    With 0 sequences per document, empty documents have none and others one.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    def write(
        prefix: Path,
        documents: Sequence[Sequence[int]],
        *,
        dtype: type[np.number] = np.int32,
        sequences_per_document: int = 1,
    ) -> Path:
        builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
        for document in documents:
            tokens = np.asarray(document, dtype=np.int64)
            pieces = np.array_split(tokens, max(1, sequences_per_document))
            lengths = [len(piece) for piece in pieces if len(piece) or sequences_per_document]
            builder.add_document(tokens, lengths)
        builder.finalize(f"{prefix}.idx")
        return prefix

    return write
