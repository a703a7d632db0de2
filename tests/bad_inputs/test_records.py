# SPDX-License-Identifier: Apache-2.0
"""Lines of JSON that are no documents, and files of lengths."""

import json
from pathlib import Path

import pytest
from bad_inputs.judge import bounded, check_refused
from data.test_records import read

from sparsebalance_megatron.data import records
from sparsebalance_megatron.data.records import BadRecords, RecordFiles
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.predict.workload import WorkloadError, read_lengths

GOOD = json.dumps({"text": "good"})


def turns(*messages: object) -> bytes:
    return json.dumps({"messages": list(messages)}).encode()


ASKED = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}
REFUSED: tuple[bytes, ...] = (
    *(b"[", b'{"text": "a"', b'{"text": "a', b'{"text": "a"}{"text": "b"}', b"{'text': 'a'}"),
    *(b'{"text": "a",}', b"5", b"null", b'"text"', b'["text"]', b"{}", b'{"content": "a"}'),
    *(b'{"text": "a", "messages": []}', b'{"text": ""}', b'{"text": null}', b'{"text": 5}'),
    *(b'{"text": ["a"]}', b'{"text": "\\ud800"}', b'{"text": "a\x01"}', b'{"text": "\xff\xfe"}'),
    *('{"text": "a"}'.encode("utf-16"), b"\xef\xbb\xbf" + GOOD.encode(), bytes(64)),
    *(b"\x1f\x8b\x08\x00\x00\x00", b"[" * 200_000, b'{"text":' * 200_000),
    *(b'{"text": ' + b"9" * 5000 + b"}", b'{"messages": []}', b'{"messages": null}'),
    *(b'{"messages": "hello"}', b'{"messages": {"role": "user"}}', turns("hello", SAID)),
    *(turns(None, SAID), turns({"content": "a"}, SAID), turns({"role": "user"}, SAID)),
    *(turns({"role": 5, "content": "a"}, SAID), turns({"role": "user", "content": 5}, SAID)),
    turns({"role": "user", "content": [{"type": "text"}]}, SAID),
    *(turns({"role": "user", "content": ""}, SAID), turns(ASKED)),
    turns({"role": "user", "content": "\ud800"}, SAID),
)
"""No document, or none that is whole and of one kind."""
ACCEPTED = {
    "NaN beside the text": (b'{"text": "a", "score": NaN}', "only the text is read"),
    "another key beside the text": (b'{"text": "a", "id": 1}', "data sets carry more than text"),
    "the key twice": (b'{"text": "b", "text": "a"}', "JSON leaves it open; the last one counts"),
    "spaces around": (b'   {"text": "a"}   ', "JSON allows them"),
    "a carriage return": (b'{"text": "a"}\r', "files of Windows end lines so"),
    "a text of spaces": (b'{"text": "   "}', "a tokenizer makes tokens of it"),
    "any role": (turns({"role": "critic", "content": "a"}, SAID), "templates know which there are"),
}
BAD_LENGTHS: tuple[bytes, ...] = (
    *(b"", b"\n\n", b"[]", b"one two", b"1\n2\nthree\n", b"0", b"5\n-3", b"1.5", b"[1, 2.5]"),
    *(b"nan", b"[NaN]", b"inf", b"1e3", b"1000000000000", b"9" * 5000, b"[[1, 2], [3]]", b"[null]"),
    *(b"[true]", b'{"lengths": [1, 2]}', b"[1, 2", b"[" * 200_000, b"\xff\xfe\x00", bytes(100)),
    b"1,2,3",
)


@pytest.mark.parametrize("line", REFUSED, ids=lambda line: str(line[:30]))
def test_a_bad_record_names_file_and_line(line: bytes, tmp_path: Path) -> None:
    path = tmp_path / "documents.jsonl"
    path.write_bytes(GOOD.encode() + b"\n\n" + line + b"\n" + GOOD.encode())
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


@pytest.mark.parametrize("text", BAD_LENGTHS, ids=lambda text: str(text[:20]))
def test_bad_lengths(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_bytes(text)
    check_refused(lambda: read_lengths(path), WorkloadError, str(path))
