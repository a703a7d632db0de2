# SPDX-License-Identifier: Apache-2.0
"""Reading records: what is accepted, and how each kind of bad record is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.records import BadRecords, PythonStandardLibrary, RecordFiles

BAD_LINES = {
    b'{"text": "\xff"}': "not UTF-8",
    b'{"text": "cut': "not JSON",
    b"[" * 100_000: "not JSON",
    b'["text"]': "not a JSON object",
    b'{"txt": "a"}': "needs one of 'text' and 'messages'",
    b'{"text": "a", "messages": []}': "needs one of 'text' and 'messages'",
    b'{"text": null}': "text is not a string",
    b'{"text": ""}': "text is empty",
    b'{"text": "\\ud800"}': "text holds half a surrogate pair",
    b'{"messages": {}}': "messages is not a list of turns",
    b'{"messages": []}': "messages is not a list of turns",
    b'{"messages": ["hello"]}': "a message is not an object",
    b'{"messages": [{"role": "user"}]}': "a message's content is not a string",
    b'{"messages": [{"role": 1, "content": "a"}]}': "a message's role is not a string",
    b'{"messages": [{"role": "assistant", "content": ""}]}': "a message's content is empty",
    b'{"messages": [{"role": "user", "content": "a"}]}': "no assistant turn",
}
GOOD = b'{"text": "good"}'


def write(path: Path, *lines: bytes) -> Path:
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


@pytest.mark.parametrize("line", BAD_LINES, ids=BAD_LINES.values())
def test_bad_record_stops_with_file_and_line(line: bytes, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", GOOD, b"", line, GOOD)
    with pytest.raises(DataError) as caught:
        list(RecordFiles([path]).records(BadRecords(skip=False)))
    assert str(caught.value).startswith(f"{path}:3: {BAD_LINES[line]}")
    assert "--on-bad-record skip" in str(caught.value)


def test_skipped_records_are_counted_by_reason(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", *BAD_LINES, GOOD)
    bad = BadRecords(skip=True)
    assert [record.text for record in RecordFiles([path]).records(bad)] == ["good"]
    reasons = list(BAD_LINES.values())
    assert bad.counts == {reason: reasons.count(reason) for reason in reasons}


def test_records_come_in_order_with_their_places(tmp_path: Path) -> None:
    first = write(tmp_path / "b.jsonl", b'{"text": "1"}', b"  ", b'{"text": "2", "id": 7}')
    second = write(
        tmp_path / "a.jsonl", b'{"messages": [{"role": "assistant", "content": "\xc3\xa9"}]}'
    )
    source = RecordFiles([first, second])
    for _ in range(2):
        records = list(source.records(BadRecords(skip=False)))
        assert [record.place for record in records] == [f"{first}:1", f"{first}:3", f"{second}:1"]
        assert [record.text for record in records] == ["1", "2", None]
        assert records[2].messages == ({"role": "assistant", "content": "é"},)
    assert source.total_bytes == first.stat().st_size + second.stat().st_size


def test_missing_input_is_named() -> None:
    with pytest.raises(DataError, match=r"--input nowhere.jsonl: no such file"):
        RecordFiles([Path("nowhere.jsonl")])


def test_standard_library_takes_sources_only(tmp_path: Path) -> None:
    for name, content in {
        "b.py": b"b = 1\n",
        "a/z.py": "z = 'é'\n".encode(),
        "empty.py": b"",
        "latin.py": b"# \xe9\n",
        "notes.txt": b"no source",
        "site-packages/installed.py": b"x = 1\n",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    bad = BadRecords(skip=False)
    records = list(PythonStandardLibrary(root=tmp_path).records(bad))
    assert [record.text for record in records] == ["z = 'é'\n", "b = 1\n"]
    assert bad.counts == {"text is empty": 1, "not UTF-8": 1}


def test_running_interpreters_library_is_long_tailed() -> None:
    sizes = sorted(path.stat().st_size for path in PythonStandardLibrary().paths)
    assert len(sizes) > 300
    assert sizes[-1] > 20 * sizes[len(sizes) // 2] > 0


@pytest.mark.parametrize(
    ("line", "keys"), [(b'{"txt": "a", "id": 1}', "its keys: 'txt', 'id'"), (b"{}", "none")]
)
def test_the_keys_of_a_bad_record_are_told(line: bytes, keys: str, tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", line)
    with pytest.raises(DataError, match=keys):
        list(RecordFiles([path]).records(BadRecords(skip=False)))
