# SPDX-License-Identifier: Apache-2.0
"""Lengths of documents from a file, in tokens, and the samples and batches that they make."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np

from sparsebalance_megatron.config import Overlong
from sparsebalance_megatron.json_file import checked, parse_json, read_text

_Lengths = Annotated[list[Annotated[int, msgspec.Meta(ge=1, le=2**30)]], msgspec.Meta(min_length=1)]
"""Tokens; the limit is a thousand times what models are trained on."""


class WorkloadError(ValueError):
    """A workload cannot be built from what the user named."""


def read_lengths(path: Path) -> np.ndarray:
    """Lengths from a JSON list, or from text with one length per line.

    Raises:
        WorkloadError: the file is missing, empty, or holds something else than positive integers.
    """
    try:
        text = read_text(path)
        as_json = text.lstrip().startswith("[")
        values = parse_json(text) if as_json else [int(word) for word in text.split()]
        lengths = checked(values, _Lengths)
    except ValueError as error:
        raise WorkloadError(
            f"{path}: {str(error)[:200]}; give a JSON list of lengths in tokens, or one per line"
        ) from error
    return np.array(lengths, dtype=np.int64)


def batches_of(
    lengths: np.ndarray, batch_size: int, steps: int, place: object
) -> tuple[tuple[int, ...], ...]:
    """Consecutive global batches, at most ``steps``; an incomplete last one is left out.

    Args:
        place: where the lengths come from, for the error.

    Raises:
        WorkloadError: there is not one.
    """
    batches = min(steps, len(lengths) // batch_size)
    if not batches:
        raise WorkloadError(
            f"{place}: {len(lengths)} samples, and a step takes --global-batch-size {batch_size}; "
            "give more, or lower it"
        )
    whole = lengths[: batches * batch_size].reshape(batches, batch_size)
    return tuple(map(tuple, whole.tolist()))


def samples_of(lengths: np.ndarray, seq_length: int, overlong: Overlong) -> np.ndarray:
    """Lengths of the samples that documents become: none above ``seq_length``."""
    if overlong == "drop":
        return lengths[lengths <= seq_length]
    if overlong == "truncate":
        return np.minimum(lengths, seq_length)
    pieces = -(-lengths // seq_length)
    cut = np.full(int(pieces.sum()), seq_length, dtype=np.int64)
    cut[np.cumsum(pieces) - 1] = lengths - (pieces - 1) * seq_length
    return cut
