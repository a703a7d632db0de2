# SPDX-License-Identifier: Apache-2.0
"""Real ``.bin`` and ``.idx`` files, written by Megatron's own builder."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np


def write_stored(
    prefix: Path,
    documents: Iterable[Sequence[int] | np.ndarray],
    *,
    dtype: type[np.number] = np.int32,
    sequences_per_document: int = 1,
) -> Path:
    """Write documents of tokens under a prefix, which is returned.

    With 0 sequences per document, empty documents have none and others one.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        tokens = np.asarray(document, dtype=dtype)
        pieces = np.array_split(tokens, max(1, sequences_per_document))
        lengths = [len(piece) for piece in pieces if len(piece) or sequences_per_document]
        builder.add_document(tokens, lengths)
    builder.finalize(f"{prefix}.idx")
    return prefix
