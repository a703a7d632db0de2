# SPDX-License-Identifier: Apache-2.0
"""Opens files that users name, and reads JSON that other programs may have written or damaged.

Bounded in memory and time: a file must be a regular one, and its size or its lines bounded.
"""

import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from sparsebalance_megatron.errors import ConfigError

MAX_BYTES = 64 * 2**20
"""Largest file that is read whole, unless a caller says otherwise."""

_SKIPPED_AT_ONCE_BYTES = 2**20
_SHOWN_CHARACTERS = 60
_PLACE = re.compile(r"(?P<rule>.*) - at `(?P<of>key in |key` in `)?\$(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")


class UnreadableFileError(ValueError):
    """The reason why a file cannot be read or parsed, without its name."""


def read_json(path: Path, kind: Any = Any, max_bytes: int = MAX_BYTES) -> Any:
    """The value that a JSON file holds, as a ``kind``; see :func:`parse_json`."""
    return parse_json(read_text(path, max_bytes), kind)


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    with open_regular(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > max_bytes:
            raise UnreadableFileError(f"cannot be read ({size} bytes, more than {max_bytes})")
        try:
            return stream.read(max_bytes).decode("utf-8")
        except UnicodeDecodeError as error:
            raise UnreadableFileError(f"not UTF-8 text (byte {error.start + 1})") from error
        except OSError as error:
            raise UnreadableFileError(f"cannot be read ({error.strerror})") from error


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; pipes, devices and folders are refused at once."""
    try:
        # Without this flag, opening a pipe without a writer would wait for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise UnreadableFileError(f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        # A zero byte in the path.
        raise UnreadableFileError(f"cannot be read ({error})") from error
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "Is a directory" if stat.S_ISDIR(mode) else "not a regular file"
        raise UnreadableFileError(f"cannot be read ({kind})")
    return os.fdopen(descriptor, "rb")


def bounded_lines(stream: BinaryIO, max_line_bytes: int) -> Iterator[bytes]:
    """Every line; what a line has beyond ``max_line_bytes`` is read and left out."""
    while line := stream.readline(max_line_bytes):
        rest = line
        most = max_line_bytes
        while len(rest) == most and not rest.endswith(b"\n"):
            most = min(max_line_bytes, _SKIPPED_AT_ONCE_BYTES)
            rest = stream.readline(most)
        yield line


def refuse_same_file(output: Path, others: Iterable[Path], flag: str) -> None:
    """Raise if a file that will be written is one of others, under whatever name."""
    for path in others:
        same = os.path.realpath(output) == os.path.realpath(path)
        if same or (
            os.path.exists(output) and os.path.exists(path) and os.path.samefile(output, path)
        ):
            raise ConfigError(f"{flag} {output}: would replace {path}; choose another")


def parse_json(text: str, kind: Any = Any) -> Any:
    """The value of a JSON text, as a ``kind`` that msgspec knows; NaN and infinity are refused."""
    try:
        value = msgspec.json.decode(text)
    except RecursionError as error:
        raise UnreadableFileError("not valid JSON (nested too deep)") from error
    except msgspec.DecodeError as error:
        raise UnreadableFileError(f"not valid JSON ({error})") from error
    return checked(value, kind)


def checked(value: Any, kind: Any) -> Any:
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UnreadableFileError(what_is_wrong(error, value)) from error


def without_nulls(value: Any, but: str = "") -> Any:
    """A value of plain types without keys whose value is null, one name apart."""
    if isinstance(value, list):
        return [without_nulls(each, but) for each in value]
    if not isinstance(value, dict):
        return value
    kept = {key: each for key, each in value.items() if each is not None or key == but}
    return {key: without_nulls(each, but) for key, each in kept.items()}


def what_is_wrong(error: msgspec.ValidationError, document: Any) -> str:
    """The key that msgspec complains of, the value that the document has there, and the rule."""
    found = _PLACE.fullmatch(str(error))
    if found is None:
        return str(error).replace("`", "")
    rule, path = found["rule"].replace("`", ""), found["path"]
    if found["of"]:
        return f"a key of {path.lstrip('.') or 'the object'}: {rule}"
    value = document
    for step in _STEP.finditer(path):
        key = step["key"] if step["index"] is None else int(step["index"])
        try:
            value = value[key]
        except (LookupError, TypeError):
            return f"{path.lstrip('.')}: {rule}"
    shown = "" if isinstance(value, dict | list) else f" {str(value)[:_SHOWN_CHARACTERS]!r}"
    if isinstance(value, bool | int | float | None):
        shown = f" {str(value)[:_SHOWN_CHARACTERS]}"
    return f"{path.lstrip('.')}{shown}: {rule}"
