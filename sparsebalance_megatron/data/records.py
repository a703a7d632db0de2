# SPDX-License-Identifier: Apache-2.0
"""Raw documents: records of files, or the sources of Python's standard library."""

from __future__ import annotations

import json
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.input_formats import MAX_LINE_BYTES, lines_of, parquet_rows

Message = dict[str, Any]
"""One turn of a conversation; ``role`` and ``content`` are strings, other keys are kept."""


@dataclass(frozen=True, kw_only=True)
class Record:
    """One document before tokenisation: either ``text`` or ``messages`` is set.

    ``place`` says where it comes from, for error messages; ``size_bytes`` what it takes there.
    """

    place: str
    size_bytes: int
    text: str | None = None
    messages: tuple[Message, ...] | None = None


class BadRecords:
    """What happens to a record that cannot be used: it stops the run, or is counted by reason."""

    def __init__(self, *, skip: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._skip = skip

    def found(self, place: str, reason: str, detail: str = "") -> None:
        """Count the record.

        Raises:
            DataError: if bad records are not to be skipped.
        """
        if not self._skip:
            explanation = f"{reason} ({detail})" if detail else reason
            raise DataError(
                f"{place}: {explanation}; correct it, or pass --on-bad-record skip to leave such "
                "records out and count them"
            )
        self.counts[reason] += 1


class Source(Protocol):
    """Documents that can be read more than once, each time in the same order."""

    @property
    def paths(self) -> Sequence[Path]: ...

    @property
    def total_bytes(self) -> int: ...

    def records(self, bad: BadRecords) -> Iterator[Record]: ...


@dataclass(frozen=True)
class RecordFiles:
    """Files of ``{"text": ...}`` or ``{"messages": [...]}``: one JSON object per line, plain or
    compressed (``.gz``, ``.zst``), or rows of ``.parquet`` with such columns.

    Blank lines are no records.
    """

    paths: Sequence[Path]

    def __post_init__(self) -> None:
        for path in self.paths:
            if not path.is_file():
                raise DataError(f"--input {path}: no such file; give files of JSON lines")

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def records(self, bad: BadRecords) -> Iterator[Record]:
        for path in self.paths:
            if path.suffix == ".parquet":
                for place, row, row_bytes in parquet_rows(path):
                    yield from _usable(partial(_record, row, place, row_bytes), place, bad)
                continue
            for place, line in lines_of(path):
                if line.strip():
                    yield from _usable(partial(_parse, line, place), place, bad)


@dataclass(frozen=True)
class PythonStandardLibrary:
    """The ``.py`` files of the running interpreter's standard library, sorted by path.

    A corpus with a natural long tail that every machine has. Its empty files and its few files in
    other encodings, some broken on purpose, are always left out and counted.
    """

    root: Path = Path(sysconfig.get_path("stdlib"))

    @property
    def paths(self) -> list[Path]:
        installed = {"site-packages", "dist-packages"}
        return sorted(
            path
            for path in self.root.rglob("*.py")
            if installed.isdisjoint(path.relative_to(self.root).parts)
        )

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def records(self, bad: BadRecords) -> Iterator[Record]:
        for path in self.paths:
            raw = path.read_bytes()
            try:
                text = raw.decode("utf-8")
            except UnicodeDecodeError:
                bad.counts["not UTF-8"] += 1
                continue
            if not text:
                bad.counts["text is empty"] += 1
                continue
            yield Record(place=str(path), size_bytes=len(raw), text=text)


def _usable(read: Callable[[], Record], place: str, bad: BadRecords) -> Iterator[Record]:
    """The record, or none and a note of why."""
    try:
        record = read()
    except _BadRecordError as error:
        bad.found(place, error.reason, error.detail)
    else:
        yield record


class _BadRecordError(Exception):
    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason = reason
        self.detail = detail


def _parse(line: bytes, place: str) -> Record:
    """The record of one line.

    Raises:
        _BadRecordError: with the reason.
    """
    if len(line) >= MAX_LINE_BYTES:
        raise _BadRecordError("line too long", f"more than {MAX_LINE_BYTES} bytes")
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise _BadRecordError("not UTF-8", f"byte {error.start + 1} of the line") from error
    except (ValueError, RecursionError) as error:
        raise _BadRecordError("not JSON", str(error)) from error
    if not isinstance(content, dict):
        raise _BadRecordError("not a JSON object", f"a {type(content).__name__}")
    return _record(content, place, len(line))


def _record(content: dict[str, Any], place: str, size_bytes: int) -> Record:
    """The record of one object; raises :class:`_BadRecordError`."""
    if ("text" in content) == ("messages" in content):
        keys = ", ".join(map(repr, content)) or "none"
        raise _BadRecordError("needs one of 'text' and 'messages'", f"its keys: {keys}"[:200])
    if "text" in content:
        text = _text(content["text"], "text")
        return Record(place=place, size_bytes=size_bytes, text=text)
    return Record(place=place, size_bytes=size_bytes, messages=_messages(content["messages"]))


def _messages(value: Any) -> tuple[Message, ...]:
    if not isinstance(value, list) or not value:
        raise _BadRecordError("messages is not a list of turns")
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict):
            raise _BadRecordError("a message is not an object", f"message {number}")
        for key in ("role", "content"):
            _text(message.get(key), f"a message's {key}", f"message {number}")
    if all(message["role"] != "assistant" for message in value):
        raise _BadRecordError("no assistant turn", "nothing to learn from")
    return tuple(value)


def _text(value: Any, what: str, detail: str = "") -> str:
    """A string that is not empty and can be encoded."""
    if not isinstance(value, str):
        raise _BadRecordError(f"{what} is not a string", detail)
    if not value:
        raise _BadRecordError(f"{what} is empty", detail)
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise _BadRecordError(
            f"{what} holds half a surrogate pair", detail or f"character {error.start + 1}"
        ) from error
    return value
