# SPDX-License-Identifier: Apache-2.0
"""Reads small text and JSON files that somebody else may have written or damaged.

Bounded in memory and time: a file must be a regular one and of a size that its format can have.
"""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

MAX_BYTES = 64 * 2**20
"""Of a file that is read whole, unless a caller says otherwise."""


class UnreadableFileError(ValueError):
    """The reason why a file cannot be read or parsed, without its name."""


def read_json(path: Path, max_bytes: int = MAX_BYTES) -> Any:
    """The value that a JSON file holds; NaN and infinity, which JSON does not have, are refused.

    Raises:
        UnreadableFileError: with the reason.
    """
    return parse_json(read_text(path, max_bytes))


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


def parse_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        UnreadableFileError: with the reason.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError as error:
        raise UnreadableFileError("not valid JSON (nested too deep)") from error
    except ValueError as error:
        raise UnreadableFileError(f"not valid JSON ({error})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
