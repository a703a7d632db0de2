# SPDX-License-Identifier: Apache-2.0
"""Stored documents: one data set in Megatron's format (``.bin`` and ``.idx``), read and written.

Of a large file's values a bounded part is checked, at places spread evenly over it; what lies
between them is found when it is read.

Layout of ``.idx`` (``megatron.core.datasets.indexed_dataset._IndexWriter``), little-endian: magic
[9 bytes], version u64, dtype code u8, sequences u64, document boundaries u64, then sequence lengths
i32, byte offsets i64, document boundaries i64 (sequence numbers, from 0), and for multimodal data
one mode i8 per sequence.
"""

import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import msgspec
import numpy as np

from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.json_file import (
    UnreadableFileError,
    read_json,
    refuse_same_file,
)

LOSS_MASK_SUFFIX = "_loss_mask"
"""``PREFIX_loss_mask.bin/.idx`` holds one uint8 per stored token: 1 where predicting it counts."""

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_SUPPORTED_VERSION = 1
_SEQUENCE_BYTES = 4 + 8
_BOUNDARY_BYTES = 8
_TOKEN_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
"""Dtypes by the code of Megatron's ``indexed_dataset.DType``; integer types only."""
_REWRITE = "write the data set again (`sparse-balance prepare-data` or Megatron's preprocess_data)"
_PLACES = 64
_PLACE_BYTES = 2**18
_VOCABULARY_REMEDY = (
    "give the model the tokenizer that made the data, or the data set of its own tokenizer"
)
_MASK_REMEDY = (
    "write the data set again with `sparse-balance prepare-data`, or remove the loss mask to train "
    "on all tokens"
)
_MASK_SUFFIXES = (f"{LOSS_MASK_SUFFIX}.bin", f"{LOSS_MASK_SUFFIX}.idx")
_SUFFIXES = (*_MASK_SUFFIXES, ".bin", ".idx", ".json")
_LARGEST_UINT16_VOCABULARY = 65499
"""Megatron's preprocessing stores larger vocabularies as int32."""


@dataclass(frozen=True)
class StoredValues:
    """The values of a file, read where they are asked for.

    None stays open or is mapped: there may be more files than a process may open.
    """

    path: Path
    dtype: np.dtype
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * self.dtype.itemsize

    def __getitem__(self, place: slice) -> np.ndarray:
        first, end, _ = place.indices(self.count)
        wanted = max(0, end - first)
        with _readable(self.path):
            offset = first * self.dtype.itemsize
            values = np.fromfile(self.path, dtype=self.dtype, count=wanted, offset=offset)
        if len(values) < wanted:
            raise DataError(f"{self.path}: cut short since it was opened; copy it again")
        return values


@dataclass(frozen=True, kw_only=True)
class Documents:
    """The documents of one data set, in stored order.

    ``starts`` says where each document starts in ``tokens`` and where the last one ends, int64;
    ``loss_mask`` is uint8 per stored token.
    """

    prefix: str
    starts: np.ndarray
    tokens: StoredValues
    loss_mask: StoredValues | None = None

    @classmethod
    def open(cls, prefix: str | Path, *, lengths_only: bool = False) -> "Documents":
        """Open and check; reads the index, no token. ``lengths_only``: the ``.idx`` file alone,
        whose tokens may be absent."""
        prefix = str(prefix)
        starts, tokens = _read_index(prefix) if lengths_only else _open_checked(prefix)
        mask = None if lengths_only else _open_loss_mask(prefix, starts)
        return cls(prefix=prefix, starts=starts, tokens=tokens, loss_mask=mask)

    def __len__(self) -> int:
        return len(self.starts) - 1

    @cached_property
    def lengths_tokens(self) -> np.ndarray:
        return np.diff(self.starts)

    def place(self, document: int, offset: int, count: int) -> slice:
        """Where ``count`` tokens of a document from ``offset`` on, and their mask, are stored."""
        first = int(self.starts[document]) + offset
        return slice(first, first + count)

    def check_values(self, vocab_size: int) -> None:
        """Look at a bounded part of the stored tokens and masks, and at the size of the tokenizer
        that ``PREFIX.json`` names, if it does."""
        try:
            tokenizer_size = read_json(Path(f"{self.prefix}.json"), _Summary).tokenizer.vocab_size
        except UnreadableFileError:
            # Another program's file, or none.
            tokenizer_size = 0
        if tokenizer_size > vocab_size:
            raise DataError(
                f"{self.prefix}.json: the data was made with a tokenizer of {tokenizer_size} "
                f"tokens, the model's vocabulary has {vocab_size}; {_VOCABULARY_REMEDY}"
            )
        for tokens in _places(self.tokens):
            check_tokens(tokens, vocab_size, str(self.tokens.path))
        if self.loss_mask is not None:
            check_loss_mask(self.loss_mask)


def write_index(path: Path, lengths_tokens: Sequence[int], dtype: type[np.integer]) -> None:
    """Write the ``.idx`` file of documents of one sequence each, from their lengths."""
    lengths = np.asarray(lengths_tokens, dtype="<i4")
    ends_bytes = np.cumsum(lengths, dtype="<i8") * np.dtype(dtype).itemsize
    code = next(code for code, known in _TOKEN_DTYPES.items() if known == dtype)
    header = _HEADER.pack(_MAGIC, _SUPPORTED_VERSION, code, len(lengths), len(lengths) + 1)
    offsets = ends_bytes - lengths * np.dtype(dtype).itemsize
    boundaries = np.arange(len(lengths) + 1, dtype="<i8")
    path.write_bytes(b"".join((header, lengths, offsets.astype("<i8"), boundaries)))


def _open_checked(prefix: str) -> tuple[np.ndarray, StoredValues]:
    starts, tokens = _read_index(prefix)
    path = _existing(tokens.path, prefix)
    stored_bytes, actual_bytes = tokens.nbytes, path.stat().st_size
    if actual_bytes != stored_bytes:
        problem = "cut short" if actual_bytes < stored_bytes else "not the file of this index"
        raise DataError(
            f"{path}: {problem}: it has {actual_bytes} bytes, {prefix}.idx describes "
            f"{stored_bytes}; copy both files again or {_REWRITE}"
        )
    if stored_bytes == 0:
        raise DataError(f"{path}: the data set holds no token; {_REWRITE}")
    return starts, tokens


def _existing(path: Path, prefix: str) -> Path:
    with _readable(path):
        if path.is_file():
            return path
    remedy = (
        "give the common prefix of a .bin and an .idx file, made by `sparse-balance prepare-data`"
    )
    if (suffix := Path(prefix).suffix) in (".bin", ".idx"):
        remedy = f"give the prefix without {suffix}: {prefix.removesuffix(suffix)}"
    raise DataError(f"{path}: no such file; {remedy}")


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Failures to read the file inside become :class:`DataError`."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read ({error.strerror}); check its permissions, or copy it again"
        ) from error


def _read_index(prefix: str) -> tuple[np.ndarray, StoredValues]:
    """Starts of the documents and the end of the last in tokens, int64, and the tokens."""
    path = _existing(Path(f"{prefix}.idx"), prefix)
    with _readable(path):
        raw = path.read_bytes()
    if len(raw) < _HEADER.size or not raw.startswith(_MAGIC):
        raise DataError(f"{path}: not a Megatron index (it begins with {raw[:9]!r}); {_REWRITE}")
    _, version, dtype_code, sequences, boundary_count = _HEADER.unpack_from(raw)
    expected_bytes = _HEADER.size + sequences * _SEQUENCE_BYTES + boundary_count * _BOUNDARY_BYTES
    problem = None
    if version != _SUPPORTED_VERSION:
        problem = f"index version {version}, expected {_SUPPORTED_VERSION}"
    elif dtype_code not in _TOKEN_DTYPES:
        problem = f"dtype code {dtype_code} is no integer type"
    elif sequences == 0:
        problem = "the data set is empty (0 sequences)"
    elif len(raw) not in (expected_bytes, expected_bytes + sequences):
        problem = f"{len(raw)} bytes, its header promises {expected_bytes}"
    if problem:
        raise DataError(f"{path}: {problem}; copy it again or {_REWRITE}")
    dtype = np.dtype(_TOKEN_DTYPES[dtype_code])
    offsets_at = _HEADER.size + 4 * sequences
    boundaries_at = _HEADER.size + _SEQUENCE_BYTES * sequences
    lengths = np.frombuffer(raw, "<i4", sequences, _HEADER.size)
    byte_offsets = np.frombuffer(raw, "<i8", sequences, offsets_at)
    boundaries = np.frombuffer(raw, "<i8", boundary_count, boundaries_at)
    ends = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if lengths.min() < 0:
        problem = "a sequence length is negative"
    elif not np.array_equal(byte_offsets, ends[:-1] * dtype.itemsize):
        problem = "sequences do not follow one another"
    elif (
        len(boundaries) < 2
        or np.diff(boundaries).min() < 0
        or boundaries[0] != 0
        or boundaries[-1] != len(lengths)
    ):
        problem = "document boundaries are out of order"
    if problem:
        raise DataError(f"{path}: damaged: {problem}; {_REWRITE}")
    return ends[boundaries], StoredValues(Path(f"{prefix}.bin"), dtype, int(ends[-1]))


def _open_loss_mask(prefix: str, starts: np.ndarray) -> StoredValues | None:
    mask_prefix = prefix + LOSS_MASK_SUFFIX
    if not any(Path(mask_prefix + suffix).exists() for suffix in (".bin", ".idx")):
        return None
    mask_starts, mask = _open_checked(mask_prefix)
    problem = None
    if not np.array_equal(starts, mask_starts):
        problem = f"its documents differ from those of {prefix}.idx"
    elif mask.dtype != np.uint8:
        problem = f"it holds {mask.dtype}, a loss mask uint8"
    if problem:
        raise DataError(f"{mask_prefix}.idx: {problem}; {_MASK_REMEDY}")
    return mask


class _Tokenizer(msgspec.Struct):
    vocab_size: int


class _Summary(msgspec.Struct):
    """What is read of the summary that ``sparse-balance prepare-data`` writes."""

    tokenizer: _Tokenizer


def check_tokens(tokens: np.ndarray, vocab_size: int, place: str) -> None:
    """Raise :class:`DataError` if a token is no row of an embedding of ``vocab_size`` rows."""
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or largest >= vocab_size:
        raise DataError(
            f"{place}: token {least if least < 0 else largest} is not in the model's vocabulary of "
            f"{vocab_size}; {_VOCABULARY_REMEDY}"
        )


def check_loss_mask(mask: StoredValues) -> None:
    any_trained = False
    for values in _places(mask):
        check_mask(values, str(mask.path))
        any_trained |= bool(values.any())
    if mask.nbytes <= _PLACES * _PLACE_BYTES and not any_trained:
        raise DataError(f"{mask.path}: all zero: no token is trained on; {_MASK_REMEDY}")


def check_mask(mask: np.ndarray, place: str) -> None:
    """Raise :class:`DataError` if a value of a loss mask is neither 0 nor 1."""
    if mask.size and (largest := int(mask.max())) > 1:
        raise DataError(f"{place}: holds {largest}, not a loss mask of 0 and 1; {_MASK_REMEDY}")


def _places(values: StoredValues) -> Iterator[np.ndarray]:
    """All of at most 16 MiB of values; of more, 64 runs of values."""
    run = max(1, _PLACE_BYTES // values.dtype.itemsize)
    for first in np.unique(np.linspace(0, max(values.count - run, 0), _PLACES).astype(np.int64)):
        yield values[first : first + run]


class DatasetWriter:
    """Context manager that writes tokens and loss masks in Megatron's format.

    Nothing that looks like a data set exists before :meth:`commit`; leaving without it removes what
    was written. The loss mask is kept only if some token is masked.
    """

    def __init__(self, prefix: str, *, vocab_size: int) -> None:
        self._prefix = prefix
        self.any_masked = False
        self.lengths_tokens: list[int] = []
        self._dtype = np.uint16 if vocab_size <= _LARGEST_UINT16_VOCABULARY else np.int32
        self._tokens = self._partial(".bin").open("wb")
        self._masks = self._partial(_MASK_SUFFIXES[0]).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        for file in (self._tokens, self._masks):
            # Of a full disk: what is buffered has nowhere to go.
            with suppress(OSError):
                file.close()
        for suffix in _SUFFIXES:
            self._partial(suffix).unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Append a document: token ids, and per token whether predicting it counts."""
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._masks.write(mask.astype(np.uint8).tobytes())
        self.lengths_tokens.append(len(tokens))
        self.any_masked |= not mask.all()

    def commit(self, summary: str) -> None:
        """Finish the files and give them their names, replacing an older data set.

        The index, without which nothing reads a data set, gets its name after the data.
        """
        self._tokens.close()
        self._masks.close()
        write_index(self._partial(".idx"), self.lengths_tokens, self._dtype)
        write_index(self._partial(_MASK_SUFFIXES[1]), self.lengths_tokens, np.uint8)
        self._partial(".json").write_text(summary, encoding="utf-8")
        for suffix in reversed(_SUFFIXES):
            Path(self._prefix + suffix).unlink(missing_ok=True)
        for suffix in _SUFFIXES:
            if self.any_masked or suffix not in _MASK_SUFFIXES:
                self._partial(suffix).replace(self._prefix + suffix)

    def _partial(self, suffix: str) -> Path:
        return Path(f"{self._prefix}{suffix}.partial-{os.getpid()}")


def check_output(prefix: str, *, overwrite: bool, inputs: Sequence[Path]) -> None:
    """Refuse a prefix that names no file, an input, or an existing data set that must stay."""
    if prefix.rpartition("/")[2] in ("", ".", ".."):
        raise DataError(f"--output-prefix '{prefix}': names no file; give a path such as out/train")
    outputs = [Path(prefix + suffix) for suffix in _SUFFIXES]
    for path in outputs:
        refuse_same_file(path, inputs, f"--output-prefix {prefix}:")
    existing = [str(path) for path in outputs if os.path.exists(path)]
    if existing and not overwrite:
        raise DataError(
            f"--output-prefix {prefix}: {', '.join(existing)} exists; choose another prefix or "
            "pass --overwrite"
        )
