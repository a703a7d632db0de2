# SPDX-License-Identifier: Apache-2.0
"""Lines of plain and compressed files, and rows of Parquet files."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from sparsebalance_megatron.data.errors import DataError

MAX_LINE_BYTES = 2**28
"""The largest record: a thousand long books."""

_COLUMNS = ("text", "messages")
_COMPRESSED = (".gz", ".zst")
_ROWS_PER_BATCH = 256
_BUFFER_BYTES = 1 << 20
_REMEDY = "copy it again"


def lines_of(path: Path) -> Iterator[tuple[str, bytes]]:
    """(place, line) of every line. A line longer than :data:`MAX_LINE_BYTES` is cut off there.

    Raises:
        DataError: compressed data is damaged, or pyarrow, which decompresses, is not installed.
    """
    with _opened(path) as stream:
        number = 0
        try:
            while line := stream.readline(MAX_LINE_BYTES):
                rest = line
                while len(rest) == MAX_LINE_BYTES and not rest.endswith(b"\n"):
                    rest = stream.readline(MAX_LINE_BYTES)
                number += 1
                yield f"{path}:{number}", line
        except OSError as error:
            raise DataError(f"{path}: damaged compression ({error}); {_REMEDY}") from error


def parquet_rows(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(place, row, bytes that the row takes of the file) of the columns ``text`` and ``messages``.

    Raises:
        DataError: the file is damaged, has neither column, or pyarrow is not installed.
    """
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
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                filled = {name: value for name, value in row.items() if value is not None}
                yield f"{path}, row {number}", filled, row_bytes
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error}); {_REMEDY}") from error


def _opened(path: Path) -> BinaryIO:
    if path.suffix not in _COMPRESSED:
        return path.open("rb")
    return io.BufferedReader(_library("pyarrow", path).input_stream(str(path)), _BUFFER_BYTES)


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.partition(".")[0]
        raise DataError(
            f"{path}: {path.suffix} files need the package {package}; install the extra: "
            'pip install "sparsebalance_megatron[data]"'
        ) from error
