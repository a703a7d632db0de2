# SPDX-License-Identifier: Apache-2.0
"""Lines of JSON that are no documents, and files of lengths."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from bad_inputs.judge import bounded, check_refused

from sparsebalance_megatron.data import records
from sparsebalance_megatron.data.records import BadRecords, RecordFiles
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.view.simulate.lengths import WorkloadError, read_lengths

GOOD = json.dumps({"text": "good"})


def turns(*messages: object) -> bytes:
    return json.dumps({"messages": list(messages)}).encode()


ASKED = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}
REFUSED: dict[str, bytes] = {
    "nothing but a bracket": b"[",
    "an open object": b'{"text": "a"',
    "an open string": b'{"text": "a',
    "two objects": b'{"text": "a"}{"text": "b"}',
    "single quotes": b"{'text': 'a'}",
    "a comma too many": b'{"text": "a",}',
    "a number": b"5",
    "null": b"null",
    "a string": b'"text"',
    "a list": b'["text"]',
    "an empty object": b"{}",
    "another key": b'{"content": "a"}',
    "both keys": b'{"text": "a", "messages": []}',
    "an empty text": b'{"text": ""}',
    "a text that is null": b'{"text": null}',
    "a text that is a number": b'{"text": 5}',
    "a text that is a list": b'{"text": ["a"]}',
    "half a surrogate pair": b'{"text": "\\ud800"}',
    "a control character": b'{"text": "a\x01"}',
    "bytes that are not UTF-8": b'{"text": "\xff\xfe"}',
    "UTF-16": '{"text": "a"}'.encode("utf-16"),
    "a byte order mark": b"\xef\xbb\xbf" + GOOD.encode(),
    "zero bytes": b"\x00" * 64,
    "compressed data": b"\x1f\x8b\x08\x00\x00\x00",
    "nested too deep": b"[" * 200_000,
    "objects nested too deep": b'{"text":' * 200_000,
    "an integer of too many digits": b'{"text": ' + b"9" * 5000 + b"}",
    "no messages": b'{"messages": []}',
    "messages that are null": b'{"messages": null}',
    "messages that are text": b'{"messages": "hello"}',
    "messages that are an object": b'{"messages": {"role": "user"}}',
    "a message that is text": turns("hello", SAID),
    "a message that is null": turns(None, SAID),
    "a message without a role": turns({"content": "a"}, SAID),
    "a message without content": turns({"role": "user"}, SAID),
    "a role that is a number": turns({"role": 5, "content": "a"}, SAID),
    "content that is a number": turns({"role": "user", "content": 5}, SAID),
    "content in parts": turns({"role": "user", "content": [{"type": "text"}]}, SAID),
    "content that is empty": turns({"role": "user", "content": ""}, SAID),
    "no assistant": turns(ASKED),
    "half a surrogate pair in content": turns({"role": "user", "content": "\ud800"}, SAID),
}
ACCEPTED = {
    "NaN beside the text": (b'{"text": "a", "score": NaN}', "only the text is read"),
    "another key beside the text": (b'{"text": "a", "id": 1}', "data sets carry more than text"),
    "the key twice": (b'{"text": "b", "text": "a"}', "JSON leaves it open; the last one counts"),
    "spaces around": (b'   {"text": "a"}   ', "JSON allows them"),
    "a carriage return": (b'{"text": "a"}\r', "files of Windows end lines so"),
    "a text of spaces": (b'{"text": "   "}', "a tokenizer makes tokens of it"),
    "any role": (turns({"role": "critic", "content": "a"}, SAID), "templates know which there are"),
}
BAD_LENGTHS: dict[str, bytes] = {
    "an empty file": b"",
    "blank lines": b"\n\n",
    "an empty list": b"[]",
    "words": b"one two",
    "a word among numbers": b"1\n2\nthree\n",
    "zero": b"0",
    "a negative number": b"5\n-3",
    "a fraction": b"1.5",
    "a fraction in a list": b"[1, 2.5]",
    "NaN": b"nan",
    "NaN in a list": b"[NaN]",
    "infinity": b"inf",
    "an exponent": b"1e3",
    "a length beyond any document": b"1000000000000",
    "a number of many digits": b"9" * 5000,
    "a list in a list": b"[[1, 2], [3]]",
    "null in a list": b"[null]",
    "true in a list": b"[true]",
    "an object": b'{"lengths": [1, 2]}',
    "an open list": b"[1, 2",
    "nested too deep": b"[" * 200_000,
    "bytes that are not UTF-8": b"\xff\xfe\x00",
    "zero bytes": b"\x00" * 100,
    "commas": b"1,2,3",
}


def read(path: Path) -> list[records.Record]:
    return list(RecordFiles([path]).records(BadRecords(skip=False)))


@pytest.mark.parametrize("name", REFUSED)
def test_a_bad_record_names_file_and_line(name: str, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\n" + REFUSED[name] + b"\n" + GOOD.encode())
    check_refused(lambda: read(path), DataError, f"{path}:3: ", "--on-bad-record skip")
    skipped = BadRecords(skip=True)
    assert len(list(RecordFiles([path]).records(skipped))) == 2
    assert skipped.counts.total() == 1


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted_records(name: str, tmp_path: Path) -> None:
    line, reason = ACCEPTED[name]
    path = tmp_path / "documents.jsonl"
    path.write_bytes(line + b"\n")
    with bounded():
        assert len(read(path)) == 1 and reason


def test_a_line_too_long_is_refused_and_the_next_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 64)
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join([GOOD, json.dumps({"text": "x" * 200}), GOOD]))
    check_refused(lambda: read(path), DataError, f"{path}:2: line too long (over 64 bytes)")
    skipped = BadRecords(skip=True)
    assert len(list(RecordFiles([path]).records(skipped))) == 2


@pytest.mark.parametrize("name", BAD_LENGTHS)
def test_bad_lengths(name: str, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(BAD_LENGTHS[name])
    check_refused(lambda: read_lengths(path), WorkloadError, str(path))
