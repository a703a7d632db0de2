# SPDX-License-Identifier: Apache-2.0
"""Reads small text and JSON files that somebody else may have written or damaged.

Bounded in memory and time: a file must be a regular one and of a size that its format can have.
"""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Any

import msgspec

MAX_BYTES = 64 * 2**20
"""Largest file that is read whole, unless a caller says otherwise."""

_SHOWN_CHARACTERS = 60
_PLACE = re.compile(r"(?P<rule>.*) - at `(?P<of>key in |key` in `)?\$(?P<path>.*)`", re.DOTALL)
_STEP = re.compile(r"\.(?P<key>[^.\[]+)|\[(?P<index>\d+)\]")


class UnreadableFileError(ValueError):
    """The reason why a file cannot be read or parsed, without its name."""


def read_json(path: Path, kind: Any = Any, max_bytes: int = MAX_BYTES) -> Any:
    """The value that a JSON file holds, as a ``kind``; see :func:`parse_json`."""
    return parse_json(read_text(path, max_bytes), kind)


def read_text(path: Path, max_bytes: int = MAX_BYTES) -> str:
    """The text of a UTF-8 file.

    Raises:
        UnreadableFileError: with the reason.
    """
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise UnreadableFileError("cannot be read (Is a directory)")
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableFileError("cannot be read (not a regular file)")
        if status.st_size > max_bytes:
            raise UnreadableFileError(
                f"cannot be read ({status.st_size} bytes, more than {max_bytes})"
            )
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnreadableFileError(f"not UTF-8 text (byte {error.start + 1})") from error
    except OSError as error:
        raise UnreadableFileError(f"cannot be read ({error.strerror})") from error
    except ValueError as error:
        if isinstance(error, UnreadableFileError):
            raise
        # A zero byte in the path.
        raise UnreadableFileError(f"cannot be read ({error})") from error


def parse_json(text: str, kind: Any = Any) -> Any:
    """The value of a JSON text, as a ``kind``; NaN and infinity, which JSON does not have, are
    refused.

    Args:
        kind: a type that msgspec knows; ``Any`` for whatever the text holds.

    Raises:
        UnreadableFileError: with the reason, or with the key, its value and what it must be.
    """
    try:
        value = msgspec.json.decode(text)
    except RecursionError as error:
        raise UnreadableFileError("not valid JSON (nested too deep)") from error
    except msgspec.DecodeError as error:
        raise UnreadableFileError(f"not valid JSON ({error})") from error
    return checked(value, kind)


def checked(value: Any, kind: Any) -> Any:
    """A value of plain types as a ``kind``.

    Raises:
        UnreadableFileError: with the key, its value and what it must be.
    """
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise UnreadableFileError(what_is_wrong(error, value)) from error


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
