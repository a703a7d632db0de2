# SPDX-License-Identifier: Apache-2.0
"""Stored documents: a checked view of one Megatron ``IndexedDataset`` (``.bin`` and ``.idx``).

Layout of ``.idx`` (``megatron.core.datasets.indexed_dataset._IndexWriter``), little-endian: magic
[9 bytes], version u64, dtype code u8, sequences u64, document boundaries u64, then sequence lengths
i32, byte offsets i64, document boundaries i64 (sequence numbers, from 0), and for multimodal data
one mode i8 per sequence. A damaged file is found here, before Megatron maps it.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.stored_values import check_loss_mask, check_token_ids
from sparsebalance_megatron.megatron.datasets import open_dataset

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_SUPPORTED_VERSION = 1
_SEQUENCE_BYTES = 4 + 8
_BOUNDARY_BYTES = 8
_REWRITE = "write the data set again (`sparse-balance prepare-data` or Megatron's preprocess_data)"

LOSS_MASK_SUFFIX = "_loss_mask"
"""``PREFIX_loss_mask.bin/.idx`` holds one uint8 per stored token: 1 where predicting it counts."""


_UINT8 = 1
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 8: 2}
"""Bytes per token by code of Megatron's ``indexed_dataset.DType``; integer types only."""


class _Header(NamedTuple):
    dtype_code: int
    sequences: int
    boundaries: int


@dataclass(frozen=True, kw_only=True)
class _Index:
    """An ``.idx`` file in memory: tokens per sequence, and where documents begin and end."""

    lengths_tokens: np.ndarray
    boundaries: np.ndarray
    dtype_code: int

    @cached_property
    def token_ends(self) -> np.ndarray:
        """Tokens before each sequence, and after the last; int64."""
        return np.concatenate(([0], np.cumsum(self.lengths_tokens, dtype=np.int64)))

    @property
    def stored_bytes(self) -> int:
        return int(self.token_ends[-1]) * self.token_bytes

    @property
    def token_bytes(self) -> int:
        return _TOKEN_BYTES[self.dtype_code]

    def same_layout(self, other: _Index) -> bool:
        return np.array_equal(self.lengths_tokens, other.lengths_tokens) and np.array_equal(
            self.boundaries, other.boundaries
        )


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of one data set, in stored order.

    Attributes:
        prefix: path without ``.bin`` or ``.idx``.
        lengths_tokens: stored tokens per document, int64, read-only.
        dataset: Megatron's ``IndexedDataset``.
        first_sequences: the sequence each document starts with.
        loss_mask: Megatron's ``IndexedDataset`` of masks with the same layout, or None.
    """

    prefix: str
    lengths_tokens: np.ndarray
    dataset: Any
    first_sequences: np.ndarray
    loss_mask: Any | None

    @classmethod
    def open(cls, prefix: str | Path) -> Documents:
        """Open and check; reads the index, no token.

        Raises:
            DataError: if a file is missing, empty, damaged or cut short, or if the files do
                not belong together.
        """
        prefix = str(prefix)
        index, dataset = _open_checked(prefix)
        lengths_tokens = np.diff(index.token_ends[index.boundaries])
        lengths_tokens.setflags(write=False)
        return cls(
            prefix=prefix,
            lengths_tokens=lengths_tokens,
            dataset=dataset,
            first_sequences=index.boundaries[:-1],
            loss_mask=_open_loss_mask(prefix, index),
        )

    @classmethod
    def lengths_only(cls, prefix: str | Path) -> Documents:
        """Open the ``.idx`` file alone: documents have lengths, and no token can be read.

        Raises:
            DataError: if the file is missing, empty, damaged or cut short.
        """
        prefix = str(prefix)
        path = _existing(Path(f"{prefix}.idx"), prefix)
        index = _read_index(path)
        return cls(
            prefix=prefix,
            lengths_tokens=np.diff(index.token_ends[index.boundaries]),
            dataset=None,
            first_sequences=index.boundaries[:-1],
            loss_mask=None,
        )

    def __len__(self) -> int:
        return len(self.lengths_tokens)

    def check_values(self, vocab_size: int) -> None:
        """Look at a bounded part of the stored tokens and masks.

        Args:
            vocab_size: rows of the model's embedding.

        Raises:
            DataError: if a token is not in the vocabulary, or the mask is not one.
        """
        check_token_ids(self.prefix, self.dataset.index.dtype, vocab_size)
        if self.loss_mask is not None:
            check_loss_mask(Path(f"{self.prefix}{LOSS_MASK_SUFFIX}.bin"))

    def read_tokens(self, document: int, offset: int, count: int) -> np.ndarray:
        """A copy of ``count`` tokens of a document from ``offset`` on, in the stored dtype.

        Megatron returns a view of its memory map and unmaps that when the data set goes away, even
        if views are left; hence the copy.
        """
        return np.array(self.dataset.get(int(self.first_sequences[document]), offset, count))

    def read_loss_mask(self, document: int, offset: int, count: int) -> np.ndarray | None:
        """A copy of the mask of the same tokens, uint8; None where the data set has no masks."""
        if self.loss_mask is None:
            return None
        return np.array(self.loss_mask.get(int(self.first_sequences[document]), offset, count))


def _open_checked(prefix: str) -> tuple[_Index, Any]:
    """Index and Megatron's ``IndexedDataset`` of a prefix whose files have passed every check."""
    index_path, data_path = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    for path in (index_path, data_path):
        _existing(path, prefix)
    index = _read_index(index_path)
    with _readable(data_path):
        data_path.open("rb").close()
    stored_bytes, actual_bytes = index.stored_bytes, data_path.stat().st_size
    if actual_bytes != stored_bytes:
        problem = "cut short" if actual_bytes < stored_bytes else "not the file of this index"
        raise DataError(
            f"{data_path}: {problem}: it has {actual_bytes} bytes, {index_path} describes "
            f"{stored_bytes}; copy both files again or {_REWRITE}"
        )
    if stored_bytes == 0:
        raise DataError(f"{prefix}.bin: the data set holds no token; {_REWRITE}")

    return index, open_dataset(prefix)


def _existing(path: Path, prefix: str) -> Path:
    with _readable(path):
        is_file = path.is_file()
    if not is_file:
        raise DataError(f"{path}: no such file; {_missing_remedy(prefix)}")
    return path


def _missing_remedy(prefix: str) -> str:
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            return f"give the prefix without {suffix}: {prefix.removesuffix(suffix)}"
    return (
        "give the common prefix of a .bin and an .idx file, made by `sparse-balance prepare-data`"
    )


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Failures to read the file inside become :class:`DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check its permissions, or copy it again"
        ) from error


def _read_index(path: Path) -> _Index:
    with _readable(path):
        return _checked_index(path)


def _checked_index(path: Path) -> _Index:
    header = _read_header(path)
    offset = _HEADER.size
    columns = []
    for dtype, count in (
        ("<i4", header.sequences),
        ("<i8", header.sequences),
        ("<i8", header.boundaries),
    ):
        columns.append(np.fromfile(path, dtype=dtype, count=count, offset=offset))
        offset += columns[-1].nbytes
    lengths, byte_offsets, boundaries = columns
    if lengths.min() < 0:
        raise DataError(f"{path}: damaged: a sequence length is negative; {_REWRITE}")
    index = _Index(lengths_tokens=lengths, boundaries=boundaries, dtype_code=header.dtype_code)
    if not np.array_equal(byte_offsets, index.token_ends[:-1] * index.token_bytes):
        raise DataError(f"{path}: damaged: sequences do not follow one another; {_REWRITE}")
    in_order = len(boundaries) >= 2 and np.diff(boundaries).min() >= 0
    if not in_order or boundaries[0] != 0 or boundaries[-1] != len(lengths):
        raise DataError(f"{path}: damaged: document boundaries are out of order; {_REWRITE}")
    return index


def _read_header(path: Path) -> _Header:
    """Header values, and that the file is as long as they say."""
    actual_bytes = path.stat().st_size
    with path.open("rb") as stream:
        raw = stream.read(_HEADER.size)
    if not raw or not _MAGIC.startswith(raw[: len(_MAGIC)]):
        raise DataError(f"{path}: not a Megatron index (it begins with {raw[:9]!r}); {_REWRITE}")
    if len(raw) < _HEADER.size:
        raise DataError(f"{path}: cut short inside its header ({actual_bytes} bytes); {_REWRITE}")
    _, version, *values = _HEADER.unpack(raw)
    header = _Header(*values)
    if version != _SUPPORTED_VERSION:
        raise DataError(
            f"{path}: index version {version}, expected {_SUPPORTED_VERSION}; {_REWRITE}"
        )
    if header.dtype_code not in _TOKEN_BYTES:
        raise DataError(f"{path}: dtype code {header.dtype_code} is no integer type; {_REWRITE}")
    if header.sequences == 0:
        raise DataError(f"{path}: the data set is empty (0 sequences); {_REWRITE}")
    expected_bytes = (
        _HEADER.size + header.sequences * _SEQUENCE_BYTES + header.boundaries * _BOUNDARY_BYTES
    )
    if actual_bytes < expected_bytes:
        raise DataError(
            f"{path}: cut short: {actual_bytes} bytes, its header promises {expected_bytes}; "
            f"copy it again or {_REWRITE}"
        )
    if actual_bytes not in (expected_bytes, expected_bytes + header.sequences):
        raise DataError(
            f"{path}: {actual_bytes} bytes do not match its header ({expected_bytes}); {_REWRITE}"
        )
    return header


def _open_loss_mask(prefix: str, index: _Index) -> Any | None:
    mask_prefix = prefix + LOSS_MASK_SUFFIX
    if not any(Path(mask_prefix + suffix).exists() for suffix in (".bin", ".idx")):
        return None
    mask_index, masks = _open_checked(mask_prefix)
    if not index.same_layout(mask_index):
        raise DataError(
            f"{mask_prefix}.idx: its documents differ from those of {prefix}.idx; write both again "
            "with `sparse-balance prepare-data`, or remove the loss mask to train on all tokens"
        )
    if mask_index.dtype_code != _UINT8:
        raise DataError(
            f"{mask_prefix}.idx: dtype code {mask_index.dtype_code}, a loss mask has {_UINT8} "
            "(uint8); write both again with `sparse-balance prepare-data`, or remove the loss mask "
            "to train on all tokens"
        )
    return masks
