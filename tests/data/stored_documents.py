# SPDX-License-Identifier: Apache-2.0
"""Real ``.bin`` and ``.idx`` files, written by Megatron's own builder, and their samples."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.config import Overlong
from sparsebalance_megatron.data.samples import Blend, SampleIndex, open_samples


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


def open_stored(
    prefix: Path | str,
    *,
    max_tokens: int = 32,
    overlong: Overlong = "split",
    seed: int = 1,
    **options: Any,
) -> SampleIndex:
    """Training's samples of one data set."""
    blend = Blend(place="--data-path", prefixes=(str(prefix),))
    shape = {"max_tokens": max_tokens, "overlong": overlong, "seed": seed}
    found = open_samples(blend, "train", **shape, **options)
    assert found is not None
    return found
