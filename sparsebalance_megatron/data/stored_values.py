# SPDX-License-Identifier: Apache-2.0
"""Whether stored tokens fit the model's vocabulary, and stored loss masks are masks.

Looks at a bounded part of a file, however large: all of a small one, places spread evenly over a
large one. What lies between them is found when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

_PLACES = 64
_PLACE_BYTES = 2**18
_VOCABULARY_REMEDY = (
    "give the model the tokenizer that made the data, or the data set of its own tokenizer"
)
_MASK_REMEDY = (
    "write the data set again with `sparse-balance prepare-data`, or remove the loss mask to train "
    "on all tokens"
)


class _Tokenizer(msgspec.Struct):
    vocab_size: int


class _Summary(msgspec.Struct):
    """What is read of the summary that ``sparse-balance prepare-data`` writes."""

    tokenizer: _Tokenizer


def check_token_ids(prefix: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Check stored tokens, and the size of the tokenizer that ``PREFIX.json`` names, if it does.

    Args:
        tokens: of ``PREFIX.bin``.
        vocab_size: rows of the model's embedding.
    """
    try:
        tokenizer_size = read_json(Path(f"{prefix}.json"), _Summary).tokenizer.vocab_size
    except UnreadableFileError:
        # Another program's file, or none.
        tokenizer_size = 0
    if tokenizer_size > vocab_size:
        raise DataError(
            f"{prefix}.json: the data was made with a tokenizer of {tokenizer_size} tokens, the "
            f"model's vocabulary has {vocab_size}; {_VOCABULARY_REMEDY}"
        )
    for place in _places(tokens):
        check_tokens(place, vocab_size, f"{prefix}.bin")


def check_tokens(tokens: np.ndarray, vocab_size: int, place: str) -> None:
    """Raise :class:`DataError` if a token is no row of an embedding of ``vocab_size`` rows."""
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= vocab_size:
        raise DataError(
            f"{place}: token {least if least < 0 else largest} is not in the model's vocabulary of "
            f"{vocab_size}; {_VOCABULARY_REMEDY}"
        )


def check_loss_mask(mask: np.ndarray, path: str) -> None:
    """Check the values of a stored loss mask, uint8."""
    any_trained = False
    for place in _places(mask):
        check_mask(place, path)
        any_trained |= bool(place.any())
    if mask.nbytes <= _PLACES * _PLACE_BYTES and not any_trained:
        raise DataError(f"{path}: all zero: no token is trained on; {_MASK_REMEDY}")


def check_mask(mask: np.ndarray, place: str) -> None:
    """Raise :class:`DataError` if a value of a loss mask is neither 0 nor 1."""
    if mask.size and (largest := int(mask.max())) > 1:
        raise DataError(f"{place}: holds {largest}, not a loss mask of 0 and 1; {_MASK_REMEDY}")


def _places(values: np.ndarray) -> Iterator[np.ndarray]:
    """All of at most 16 MiB of values; of more, 64 runs of values."""
    run = max(1, _PLACE_BYTES // values.itemsize)
    for first in np.unique(np.linspace(0, max(len(values) - run, 0), _PLACES).astype(np.int64)):
        yield values[first : first + run]
