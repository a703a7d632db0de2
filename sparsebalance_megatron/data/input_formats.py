# SPDX-License-Identifier: Apache-2.0
"""Lines of plain and compressed files, and rows of Parquet files."""

from __future__ import annotations

import gzip
import importlib
import io
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, cast

from sparsebalance_megatron.data.errors import DataError

MAX_LINE_BYTES = 2**28
"""Of a record; a thousand long books."""

_COLUMNS = ("text", "messages")
_ROWS_AT_ONCE = 256
_READ_BYTES = 1 << 20
_REPAIR = "copy it again"


def can_be_divided(path: Path) -> bool:
    """Whether reading may begin in the middle of a file."""
    return path.suffix not in (".gz", ".zst", ".parquet")


def lines_of(path: Path, begin: int, end: int) -> Iterator[tuple[str, bytes]]:
    """(place, line) of every line that begins within a range of bytes.

    ``.gz`` and ``.zst`` are read whole, and belong to the range that holds their first byte. A line
    that is too long is cut off, and then no JSON, and its rest is passed over.

    Raises:
        DataError: if compressed data is damaged, or its library is not installed.
    """
    if not can_be_divided(path):
        if begin > 0:
            return
        with _decompressed(path) as stream:
            try:
                for number, line in enumerate(_lines(stream), start=1):
                    yield f"{path}:{number}", line
            except (EOFError, OSError, zlib.error, _zstd_error()) as error:
                raise DataError(f"{path}: damaged compression ({error}); {_REPAIR}") from error
        return
    with path.open("rb") as stream:
        named: Iterator[tuple[str, bytes]]
        if begin == 0:
            named = ((f"{path}:{number}", each) for number, each in enumerate(_lines(stream), 1))
        else:
            # The line that holds the byte before is of the range before.
            stream.seek(begin - 1)
            next(_lines(stream), None)
            named = _lines_by_byte(path, stream)
        position = stream.tell()
        for place, line in named:
            if position >= end:
                return
            yield place, line
            position = stream.tell()


def parquet_rows(path: Path, begin: int) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(place, row, bytes that it takes of the file) of a file's columns ``text`` and ``messages``.

    Args:
        begin: the first byte of the range to read; files belong to the range of their first.

    Raises:
        DataError: if the file is damaged, has neither column, or pyarrow is not installed.
    """
    if begin > 0:
        return
    parquet, arrow = _library("pyarrow.parquet", path), _library("pyarrow", path)
    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in _COLUMNS if name in file.schema_arrow.names]
        if not columns:
            raise DataError(
                f"{path}: no column {' or '.join(_COLUMNS)}; its columns: "
                f"{', '.join(file.schema_arrow.names)[:200]}"
            )
        row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS_AT_ONCE, columns=columns):
            for row in batch.to_pylist():
                number += 1
                filled = {name: value for name, value in row.items() if value is not None}
                yield f"{path}, row {number}", filled, row_bytes
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error}); {_REPAIR}") from error


def _lines(stream: BinaryIO) -> Iterator[bytes]:
    while line := stream.readline(MAX_LINE_BYTES):
        rest = line
        while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
            rest = stream.readline(MAX_LINE_BYTES)
        yield line


def _lines_by_byte(path: Path, stream: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Nobody has counted the lines before."""
    position = stream.tell()
    for line in _lines(stream):
        yield f"{path}, line at byte {position}", line
        position = stream.tell()


def _decompressed(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return io.BufferedReader(_ZstdStream(path.open("rb"), _library("zstandard", path)))


class _ZstdStream(io.RawIOBase):
    """What a file's frames hold. The library's own stream takes a file that is cut short for one
    that ends there."""

    def __init__(self, file: BinaryIO, library: Any) -> None:
        self._file = file
        self._new_frame = library.ZstdDecompressor().decompressobj
        self._frame = self._new_frame()
        self._begun = False
        self._pending = b""

    def readable(self) -> bool:
        return True

    def readinto(self, into: Any) -> int:
        while not self._pending:
            if self._frame.eof:
                read = self._frame.unused_data or self._file.read(_READ_BYTES)
                self._frame, self._begun = self._new_frame(), False
            else:
                read = self._file.read(_READ_BYTES)
            if not read:
                if self._begun:
                    raise EOFError("it ends inside a frame")
                return 0
            self._begun = True
            self._pending = self._frame.decompress(read)
        size = min(len(into), len(self._pending))
        into[:size], self._pending = self._pending[:size], self._pending[size:]
        return size

    def close(self) -> None:
        self._file.close()
        super().close()


def _zstd_error() -> type[Exception]:
    """What damaged data raises; where the library is not installed, nothing does."""
    try:
        error: type[Exception] = importlib.import_module("zstandard").ZstdError
    except ModuleNotFoundError:
        return EOFError
    return error


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{path}: {path.suffix} files need the package {package}; install the extra: "
            'pip install "sparsebalance_megatron[data]"'
        ) from error
