# SPDX-License-Identifier: Apache-2.0
"""Reading records of every format: their order and places, and what is said of bad ones."""

import gzip
import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from sparsebalance_megatron.data import records
from sparsebalance_megatron.data.records import BadRecords, RecordFiles
from sparsebalance_megatron.errors import DataError

CLOCK = {"name": "clock", "arguments": '{"zone": "UTC"}'}
ROWS: list[dict[str, Any]] = [
    {"text": "one"},
    {
        "messages": [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": None, "tool_calls": [{"function": CLOCK}]},
            {"role": "tool", "content": ""},
            {"role": "assistant", "content": "é"},
        ],
        "tools": [{"type": "function", "function": {"name": "clock"}}],
    },
    # What is of conversations alone means nothing beside a text.
    {"text": "three\nlines\n", "system": 7},
]
PLAIN = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
NAMES = ["in.jsonl", "in.jsonl.gz", "in.JSONL.GZ", "in.jsonl.zst", "in.parquet", "in.PARQUET"]


def read(*paths: Path) -> list[records.Record]:
    return list(RecordFiles(paths).records(BadRecords(skip=False)))


def write(path: Path) -> Path:
    """The rows, in the format that the name asks for."""
    match path.suffix.lower():
        case ".gz":
            # Two members, and the zeros that fill a block.
            members = [gzip.compress(part) for part in (PLAIN[:50], PLAIN[50:])]
            path.write_bytes(b"".join(members) + bytes(512))
        case ".zst":
            # Two frames, one after the other.
            arrow = pytest.importorskip("pyarrow")
            halves = (PLAIN[:50], PLAIN[50:])
            frames = [arrow.compress(half, "zstd", asbytes=True) for half in halves]
            path.write_bytes(b"".join(frames))
        case ".parquet":
            # Columns are those of the first row; turns and tools are text.
            absent = {"id": 7, "text": None, "messages": None, "tools": None}
            rows = [absent | row for row in ROWS]
            rows[1] |= {key: json.dumps(ROWS[1][key]) for key in ("messages", "tools")}
            write_parquet(path, rows)
        case _:
            path.write_bytes(PLAIN)
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    arrow = pytest.importorskip("pyarrow")
    importlib.import_module("pyarrow.parquet").write_table(arrow.Table.from_pylist(rows), path)


@pytest.mark.parametrize("name", NAMES)
def test_every_format_holds_the_same_records(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    found = read(path)
    assert [record.text for record in found] == ["one", None, "three\nlines\n"]
    assert found[1].messages is not None
    call = {"function": CLOCK | {"arguments": {"zone": "UTC"}}}
    calling = ROWS[1]["messages"][1] | {"tool_calls": [call]}
    expected = [calling if "tool_calls" in turn else turn for turn in ROWS[1]["messages"]]
    assert list(found[1].messages) == expected
    assert [record.tools for record in found] == [None, ROWS[1]["tools"], None]
    place = f"{path}, row 3" if name.lower().endswith("parquet") else f"{path}:3"
    assert found[2].place == place


@pytest.mark.parametrize("name", NAMES[1:])
def test_damaged_files_are_named(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name)
    path.write_bytes(path.read_bytes().rstrip(b"\0")[:-5])
    with pytest.raises(DataError, match=rf"{path}: (damaged compression|not readable as Parquet)"):
        read(path)


def test_parquet_without_a_known_column_is_named(tmp_path: Path) -> None:
    write_parquet(tmp_path / "in.parquet", [{"content": "a"}])
    with pytest.raises(DataError, match="no column text or messages; its columns: content"):
        read(tmp_path / "in.parquet")


def test_records_come_in_order_with_their_places(tmp_path: Path) -> None:
    first, second = tmp_path / "b.jsonl", tmp_path / "a.jsonl"
    first.write_bytes(b'{"text": "1"}\n  \n{"text": "2", "id": 7}\n')
    second.write_bytes(PLAIN.splitlines()[1])
    source = RecordFiles([first, second])
    for _ in range(2):
        found = list(source.records(BadRecords(skip=False)))
        assert [record.place for record in found] == [f"{first}:1", f"{first}:3", f"{second}:1"]
        assert [record.text for record in found] == ["1", "2", None]
    assert source.total_bytes == first.stat().st_size + second.stat().st_size
