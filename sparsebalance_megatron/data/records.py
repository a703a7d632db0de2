# SPDX-License-Identifier: Apache-2.0
"""Raw documents: records of files."""

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, BinaryIO, cast

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

MARKS = ("weight", "train", "trainable", "loss", "loss_mask")
"""Keys by which data sets say that an assistant's turn is not to be learnt: 0 or false."""

_COLUMNS = ("text", "messages")
_COLUMNS_OF_JSON = ("messages", "tools")
_UNUSABLE = {
    "functions": "give them as tools",
    "function_call": "give it as tool_calls",
    "chat_template_kwargs": "pass --chat-template-kwargs, and divide records that differ in them",
    "documents": "write them into a turn",
}
"""Keys of records and turns that say what a template writes; what to do instead."""
_MAY_MATTER = re.compile(r"system|train|loss|mask|weight|learn|ignore|skip|exclude|supervis")
"""Names of other keys that could say what is learnt."""
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


def is_trained(message: Message) -> bool:
    """Whether a turn is the assistant's, and none of :data:`MARKS` says that it is not learnt."""
    return message["role"] == "assistant" and not any(message.get(key) == 0 for key in MARKS)


class BadRecords:
    """Handles unusable records: the first stops the run, or all are counted by reason.

    ``unread`` counts, by key, what could say otherwise what is learnt, and is not read.
    """

    def __init__(self, *, skip: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.unread: Counter[str] = Counter()
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
            is_parquet = path.suffix.lower() == ".parquet"
            contents = _parquet_records(path) if is_parquet else _json_lines(path, bad)
            for place, content, size_bytes in contents:
                try:
                    content = _with_columns_parsed(content)
                    checked = msgspec.convert(content, _Content)
                except msgspec.ValidationError as error:
                    reason = _PLACE_IN_RECORD.sub("[]", what_is_wrong(error, None))
                    explanation = what_is_wrong(error, content)
                    if isinstance(content, dict):
                        explanation += f" (keys: {', '.join(content)}"[:_SHOWN_CHARACTERS] + ")"
                    bad.found(place, reason, explanation)
                    continue
                given = content.get("messages") or []
                bad.unread.update(_unread_keys(content, given))
                turns = [
                    _message(*each) for each in zip(given, checked.messages or (), strict=True)
                ]
                if checked.system:
                    turns.insert(0, {"role": "system", "content": checked.system})
                yield Record(
                    place=place,
                    size_bytes=size_bytes,
                    text=checked.text,
                    messages=tuple(turns) or None,
                    tools=checked.tools or None,
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


_Mark = bool | int | float | None


class _Turn(msgspec.Struct):
    role: _Text
    content: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: Any = None
    weight: _Mark = None
    train: _Mark = None
    trainable: _Mark = None
    loss: _Mark = None
    loss_mask: _Mark = None

    def __post_init__(self) -> None:
        _refuse_unusable(self)
        for key in MARKS:
            if (mark := getattr(self, key)) not in (None, 0, 1):
                raise ValueError(f"{key} is {mark}, and must be 0 or 1, true or false")
        check_encodable(self.role, self.content or "")
        # A tool may return nothing, and an empty system turn replaces a template's own.
        may_be_empty = self.content is not None and self.role in ("system", "tool")
        if not (self.content or self.tool_calls or may_be_empty):
            raise ValueError("content is empty, and there are no tool_calls")


class _Content(msgspec.Struct):
    """Keys of a record; null counts as absent, and so does what is empty beside the turns."""

    text: _Text | None = None
    messages: Annotated[list[_Turn], msgspec.Meta(min_length=1)] | None = None
    tools: list[dict[str, Any]] | None = None
    system: Any = None
    functions: Any = None
    chat_template_kwargs: Any = None
    documents: Any = None

    def __post_init__(self) -> None:
        if self.messages:
            _refuse_unusable(self)
            if not isinstance(self.system, str | None):
                raise ValueError("'system' is not text")
            first = self.messages[0]
            if first.role in ("system", "developer") and self.system:
                if self.system != first.content:
                    raise ValueError("'system' differs from the system turn; keep one")
                self.system = None
            check_encodable(self.system or "")
        else:
            self.system = None
        if (self.text is None) == (self.messages is None):
            raise ValueError("needs one of 'text' and 'messages'")
        check_encodable(self.text or "")
        if self.messages and all(turn.role != "assistant" for turn in self.messages):
            raise ValueError("no assistant turn, so nothing to learn from")


def _refuse_unusable(keys: _Content | _Turn) -> None:
    for key in _UNUSABLE.keys() & {*keys.__struct_fields__}:
        if getattr(keys, key):
            raise ValueError(f"{key!r} is not used: {_UNUSABLE[key]}")


def _with_columns_parsed(content: Any) -> Any:
    """A record whose turns and tools, if they are JSON text as in some columns, are read."""
    if not isinstance(content, dict):
        return content
    texts = {key: content[key] for key in _COLUMNS_OF_JSON if isinstance(content.get(key), str)}
    try:
        return content | {key: _parsed(text or "[]", list, key) for key, text in texts.items()}
    except ValueError as error:
        raise msgspec.ValidationError(str(error)) from None


def _unread_keys(content: dict[str, Any], turns: Sequence[Message]) -> Iterator[str]:
    """Keys of a conversation and its turns that may say what is learnt, and are not read."""
    if turns:
        yield from filter(_MAY_MATTER.search, content.keys() - {*_Content.__struct_fields__})
    for turn in turns:
        yield from filter(_MAY_MATTER.search, turn.keys() - {*_Turn.__struct_fields__})
        if turn["role"] != "assistant":
            yield from (f"{key} of {turn['role']} turns" for key in MARKS if turn.get(key))


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
        except (OSError, EOFError, zlib.error) as error:
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
        used = {*_Content.__struct_fields__}
        columns = [name for name in names if name in used or _MAY_MATTER.search(name)]
        row_bytes = path.stat().st_size // max(1, file.metadata.num_rows)
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=columns):
            for row in batch.to_pylist():
                number += 1
                # A row has all keys that any row has: what is null was not there.
                yield f"{path}, row {number}", without_nulls(row), row_bytes
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet ({error}); copy it again") from error


def _opened(path: Path) -> BinaryIO:
    suffix = path.suffix.lower()
    if suffix == ".gz":
        # Python's reader takes the zeros that tapes and object stores leave after the last member.
        return cast(BinaryIO, gzip.open(path))
    if suffix != ".zst":
        return open_regular(path)
    import pyarrow

    stream = pyarrow.input_stream(str(path), compression="zstd")
    return io.BufferedReader(stream, _BUFFER_BYTES)
