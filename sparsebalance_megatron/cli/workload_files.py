# SPDX-License-Identifier: Apache-2.0
"""Files that commands which plan read for the lengths of samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sparsebalance_megatron.data.documents import document_lengths_tokens
from sparsebalance_megatron.simulate.lengths import WorkloadError, read_lengths

LENGTHS_HELP = "JSON list, text with one per line, or the prefix of .bin and .idx files"


def lengths_of(path: Path) -> np.ndarray:
    """Lengths in tokens from a list, or of the documents of ``path``.idx; empty ones left out.

    Raises:
        WorkloadError, DataError: the file is missing, damaged, or holds no lengths.
    """
    index = path if path.suffix == ".idx" else path.with_name(f"{path.name}.idx")
    if (path.exists() and path != index) or not index.is_file():
        return read_lengths(path)
    lengths = document_lengths_tokens(index)
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise WorkloadError(f"{index}: holds no document with a token")
    return lengths
