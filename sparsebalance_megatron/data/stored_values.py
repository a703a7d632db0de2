# SPDX-License-Identifier: Apache-2.0
"""Whether stored tokens fit the model's vocabulary, and stored loss masks are masks.

Looks at a bounded part of a file, however large: all of a small one, places spread evenly over a
large one. What lies between them is found when it is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

_PLACES = 64
_PLACE_BYTES = 2**18
_VOCABULARY_REMEDY = (
    "give the model the tokenizer that made the data, or the data set of its own tokenizer"
)


def check_token_ids(prefix: str, dtype: type[np.number], vocab_size: int) -> None:
    """Check ``PREFIX.bin``, and the size of the tokenizer that ``PREFIX.json`` names, if it does.

    Args:
        dtype: of the stored tokens.
        vocab_size: rows of the model's embedding.

    Raises:
        DataError: if the tokenizer has more tokens, or a token is no row of the embedding.
    """
    tokenizer_size = _tokenizer_size(Path(f"{prefix}.json"))
    if tokenizer_size is not None and tokenizer_size > vocab_size:
        raise DataError(
            f"{prefix}.json: the data was made with a tokenizer of {tokenizer_size} tokens, the "
            f"model's vocabulary has {vocab_size}; {_VOCABULARY_REMEDY}"
        )
    for values in _places(Path(f"{prefix}.bin"), dtype):
        check_tokens(values, vocab_size, f"{prefix}.bin")


def check_tokens(tokens: np.ndarray, vocab_size: int, place: str) -> None:
    """Raise :class:`DataError` if a token is no row of an embedding of ``vocab_size`` rows."""
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= vocab_size:
        raise DataError(
            f"{place}: token {least if least < 0 else largest} is not in the model's vocabulary of "
            f"{vocab_size}; {_VOCABULARY_REMEDY}"
        )


def check_loss_mask(path: Path) -> None:
    """Check the values of a stored loss mask, ``PREFIX_loss_mask.bin``, uint8.

    Raises:
        DataError: if one is neither 0 nor 1, or all of them are 0.
    """
    any_trained = False
    whole = path.stat().st_size <= _PLACES * _PLACE_BYTES
    for values in _places(path, np.uint8):
        check_mask(values, str(path))
        any_trained |= bool(values.any())
    if whole and not any_trained:
        raise DataError(
            f"{path}: all zero: no token is trained on; write the data set again with "
            "`sparse-balance prepare-data`, or remove the loss mask to train on all tokens"
        )


def check_mask(mask: np.ndarray, place: str) -> None:
    """Raise :class:`DataError` if a value of a loss mask is neither 0 nor 1."""
    if mask.size and (largest := int(mask.max())) > 1:
        raise DataError(
            f"{place}: holds {largest}, not a loss mask of 0 and 1; write the data set again with "
            "`sparse-balance prepare-data`, or remove the loss mask to train on all tokens"
        )


def _places(path: Path, dtype: type[np.number]) -> Iterator[np.ndarray]:
    """All values of a file of at most 16 MiB; of a larger one, 64 runs of values."""
    value_bytes = np.dtype(dtype).itemsize
    run = _PLACE_BYTES // value_bytes
    try:
        stored = path.stat().st_size // value_bytes
        for first in np.unique(np.linspace(0, max(stored - run, 0), _PLACES).astype(np.int64)):
            values = np.fromfile(path, dtype=dtype, count=run, offset=int(first) * value_bytes)
            if values.size:
                yield values
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); copy it again") from error


def _tokenizer_size(path: Path) -> int | None:
    """What the summary of `sparse-balance prepare-data` says; None for any other file."""
    try:
        size = read_json(path)["tokenizer"]["vocab_size"]
    except (UnreadableFileError, TypeError, KeyError, IndexError):
        return None
    return size if isinstance(size, int) and not isinstance(size, bool) else None
