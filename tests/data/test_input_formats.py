# SPDX-License-Identifier: Apache-2.0
"""Compressed and Parquet inputs hold the records of the plain file, or say what is wrong."""

from __future__ import annotations

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from sparsebalance_megatron.data import input_formats
from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.records import BadRecords, RecordFiles

ROWS: list[dict[str, Any]] = [
    {"text": "one"},
    {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "é"}]},
    {"text": "three\nlines\n"},
]
PLAIN = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    """One frame."""
    compressed: bytes = pytest.importorskip("pyarrow").compress(content, "zstd", asbytes=True)
    return compressed


def write(path: Path) -> Path:
    """The rows, in the format that the name asks for."""
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(PLAIN))
    elif path.suffix == ".zst":
        path.write_bytes(zstd(PLAIN))
    elif path.suffix == ".parquet":
        arrow = pytest.importorskip("pyarrow")
        parquet = importlib.import_module("pyarrow.parquet")
        # Columns are those of the first row.
        rows = [{"id": 7, "text": None, "messages": None} | row for row in ROWS]
        parquet.write_table(arrow.Table.from_pylist(rows), path)
    else:
        path.write_bytes(PLAIN)
    return path


NAMES = ["in.jsonl", "in.jsonl.gz", "in.jsonl.zst", "in.parquet"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_holds_the_same_records(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    records = list(RecordFiles([path]).records(BadRecords(skip=False)))
    assert [record.text for record in records] == ["one", None, "three\nlines\n"]
    assert records[1].messages == tuple(ROWS[1]["messages"])
    place = f"{path}, row 3" if name.endswith("parquet") else f"{path}:3"
    assert records[2].place == place


@pytest.mark.parametrize("name", NAMES[1:])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match=rf"{path}: (damaged compression|not readable as Parquet)"):
        list(RecordFiles([path]).records(BadRecords(skip=False)))


def test_rows_without_a_known_column_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    path = tmp_path / "in.parquet"
    table = arrow.Table.from_pylist([{"content": "a"}])
    importlib.import_module("pyarrow.parquet").write_table(table, path)
    with pytest.raises(DataError, match="no column text or messages; its columns: content"):
        list(RecordFiles([path]).records(BadRecords(skip=False)))


@pytest.mark.parametrize(("name", "package"), [("a.zst", "pyarrow"), ("a.parquet", "pyarrow")])
def test_a_missing_library_is_named_with_its_remedy(
    tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def absent(module: str) -> Any:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(input_formats.importlib, "import_module", absent)
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(DataError) as caught:
        list(RecordFiles([tmp_path / name]).records(BadRecords(skip=False)))
    assert f"need the package {package}" in str(caught.value)
    assert 'pip install "sparsebalance_megatron[data]"' in str(caught.value)


def test_frames_of_zstandard_follow_each_other(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl.zst"
    half = len(PLAIN) // 2
    path.write_bytes(zstd(PLAIN[:half]) + zstd(PLAIN[half:]))
    assert len(list(RecordFiles([path]).records(BadRecords(skip=False)))) == len(ROWS)
