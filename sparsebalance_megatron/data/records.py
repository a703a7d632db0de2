# SPDX-License-Identifier: Apache-2.0
"""Raw documents: records of files."""

from __future__ import annotations

import io
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO

import msgspec

from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.json_file import (
    UnreadableFileError,
    bounded_lines,
    open_regular,
    parse_json,
    what_is_wrong,
    without_nulls,
)

MAX_LINE_BYTES = 2**28
"""The largest record: a thousand long books."""

_COLUMNS = ("text", "messages")
_OPTIONAL_COLUMNS = ("tools",)
_COMPRESSED = (".gz", ".zst")
_ROWS_PER_BATCH = 256
_BUFFER_BYTES = 1 << 20
_SHOWN_CHARACTERS = 200
_PLACE_IN_RECORD = re.compile(r"\[\d+\]")

Message = dict[str, Any]
"""One turn of a conversation; ``role`` and ``content`` are strings, other keys are kept.

The content of a turn with ``tool_calls`` may be None.
"""

Tools = Sequence[dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Record:
    """One document before tokenisation: either ``text`` or ``messages`` is set.

    ``place`` is for error messages; ``size_bytes`` says what it takes there.
    """

    place: str
    size_bytes: int
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    tools: Tools | None = None


class BadRecords:
    """Handles unusable records: the first stops the run, or all are counted by reason."""

    def __init__(self, *, skip: bool) -> None:
        self.counts: Counter[str] = Counter()
        self._skip = skip

    def found(self, place: str, reason: str, explanation: str) -> None:
        if not self._skip:
            raise DataError(
                f"{place}: {explanation}; correct it, or pass --on-bad-record skip to leave such "
                "records out and count them"
            )
        self.counts[reason] += 1


@dataclass(frozen=True)
class RecordFiles:
    """Files of ``{"text": ...}`` or ``{"messages": [...], "tools": [...]}``.

    One JSON object per line, plain or compressed (``.gz``, ``.zst``), or rows of ``.parquet``.
    Blank lines are no records.
    """

    paths: Sequence[Path]

    def __post_init__(self) -> None:
        for path in self.paths:
            try:
                open_regular(path).close()
            except UnreadableFileError as error:
                raise DataError(f"--input {path}: {error}; give files of JSON lines") from error

    @property
    def total_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def records(self, bad: BadRecords) -> Iterator[Record]:
        for path in self.paths:
            is_parquet = path.suffix == ".parquet"
            contents = _parquet_records(path) if is_parquet else _json_lines(path, bad)
            for place, content, size_bytes in contents:
                try:
                    checked = msgspec.convert(content, _Content)
                except msgspec.ValidationError as error:
                    reason = _PLACE_IN_RECORD.sub("[]", what_is_wrong(error, None))
                    explanation = what_is_wrong(error, content)
                    if isinstance(content, dict):
                        explanation += f" (keys: {', '.join(content)}"[:_SHOWN_CHARACTERS] + ")"
                    bad.found(place, reason, explanation)
                    continue
                turns = zip(content.get("messages") or (), checked.messages or (), strict=True)
                yield Record(
                    place=place,
                    size_bytes=size_bytes,
                    text=checked.text,
                    messages=tuple(_message(*turn) for turn in turns) or None,
                    tools=checked.definitions,
                )


def check_encodable(*texts: str) -> None:
    """Raise :class:`ValueError` at what is no text in UTF-8."""
    try:
        "".join(texts).encode("utf-8")
    except UnicodeEncodeError:
        raise ValueError("half a surrogate pair") from None


_Text = Annotated[str, msgspec.Meta(min_length=1)]


class _Function(msgspec.Struct):
    name: _Text
    arguments: dict[str, Any] | str = {}

    def __post_init__(self) -> None:
        if isinstance(self.arguments, str):
            self.arguments = _parsed(self.arguments or "{}", dict[str, Any], "arguments")


class _Call(msgspec.Struct):
    function: _Function


class _Turn(msgspec.Struct):
    role: _Text
    content: str | None = None
    tool_calls: list[_Call] | None = None

    def __post_init__(self) -> None:
        check_encodable(self.role, self.content or "")
        # A tool may return nothing, and an empty system turn replaces a template's own.
        may_be_empty = self.content is not None and self.role in ("system", "tool")
        if not (self.content or self.tool_calls or may_be_empty):
            raise ValueError("content is empty, and there are no tool_calls")


class _Content(msgspec.Struct):
    """Keys that a record must hold; other keys are ignored, and null counts as absent.

    ``tools`` may be JSON text, as columns of Parquet hold it.
    """

    text: _Text | None = None
    messages: Annotated[list[_Turn], msgspec.Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | str | None = None

    def __post_init__(self) -> None:
        if (self.text is None) == (self.messages is None):
            raise ValueError("needs one of 'text' and 'messages'")
        check_encodable(self.text or "")
        if self.messages and all(turn.role != "assistant" for turn in self.messages):
            raise ValueError("no assistant turn, so nothing to learn from")
        if isinstance(self.tools, str):
            self.tools = _parsed(self.tools or "[]", list[dict[str, Any]], "tools")

    @property
    def definitions(self) -> Tools | None:
        return self.tools if isinstance(self.tools, list) and self.tools else None


def _parsed(text: str, kind: Any, key: str) -> Any:
    try:
        return parse_json(text, kind)
    except UnreadableFileError as error:
        raise ValueError(f"{key}: {error}") from None


def _message(given: Message, checked: _Turn) -> Message:
    """A turn with a content, if only None, and the arguments of calls as objects, which templates
    write as JSON: inference servers give them so, while records often hold JSON text."""
    message = {"content": None, **given}
    if checked.tool_calls:
        message["tool_calls"] = [
            {**call, "function": {**call["function"], "arguments": each.function.arguments}}
            for call, each in zip(given["tool_calls"], checked.tool_calls, strict=True)
        ]
    return message


def _json_lines(path: Path, bad: BadRecords) -> Iterator[tuple[str, Any, int]]:
    """(place, value, bytes) of every line that is JSON and not blank."""
    with _opened(path) as stream:
        try:
            for number, line in enumerate(bounded_lines(stream, MAX_LINE_BYTES), start=1):
                place = f"{path}:{number}"
                if len(line) >= MAX_LINE_BYTES:
                    bad.found(
                        place, "line too long", f"line too long (over {MAX_LINE_BYTES} bytes)"
                    )
                elif not line.isspace():
                    try:
                        yield place, json.loads(line.decode("utf-8")), len(line)
                    except UnicodeDecodeError as error:
                        bad.found(place, "not UTF-8", f"not UTF-8 (byte {error.start + 1})")
                    except (ValueError, RecursionError) as error:
                        bad.found(place, "not JSON", f"not JSON ({error})")
        except OSError as error:
            raise DataError(f"{path}: damaged compression ({error}); copy it again") from error


def _parquet_records(path: Path) -> Iterator[tuple[str, dict[str, Any], int]]:
    """(place, value, bytes in the file) of every row."""
    import pyarrow as arrow
    from pyarrow import parquet

    number = 0
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if not {*_COLUMNS} & {*names}:
            raise DataError(
                f"{path}: no column {' or '.join(_COLUMNS)}; its columns: "
                f"{', '.join(names)[:_SHOWN_CHARACTERS]}"
            )
        columns = [name for name in (*_COLUMNS, *_OPTIONAL_COLUMNS) if name in names]
        row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                # A row has all keys that any row has: what is null was not there.
                yield f"{path}, row {number}", without_nulls(row), row_bytes
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error}); copy it again") from error


def _opened(path: Path) -> BinaryIO:
    if path.suffix not in _COMPRESSED:
        return open_regular(path)
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(str(path)), _BUFFER_BYTES)
