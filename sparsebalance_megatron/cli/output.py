# SPDX-License-Identifier: Apache-2.0
"""Printing and writing of commands; each failure is one line."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsebalance_megatron.json_file import refuse_same_file
from sparsebalance_megatron.text_table import terminal_columns, wrapped

NOTES_SHOWN = 8


class OutputError(ValueError):
    """A package to show something with is missing, or a file cannot be written."""


def print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def print_wrapped(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print("\n".join(wrapped(sentence, terminal_columns())))


def print_notes(notes: Sequence[str]) -> None:
    for note in notes[:NOTES_SHOWN]:
        print(f"note: {note}")
    if len(notes) > NOTES_SHOWN:
        print(f"note: {len(notes) - NOTES_SHOWN} more like these")


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file that is written inside; failures become :class:`OutputError`."""
    if path == Path("-"):
        raise OutputError("-: stands for no file here; name one, or use --json where there is one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise OutputError(f"{path}: cannot be written: {error.strerror}") from error


def check_writable(path: Path) -> None:
    """Refuse a file that could not be written, before the minutes that what it holds takes."""
    with writing(path):
        if path.is_dir():
            raise OutputError(f"--output {path}: is a directory; name a file")
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def refuse_output_over_logs(output: Path | None, *directories: Path | None) -> None:
    """Raise if an output would replace a log of the runs that are read."""
    if output is not None:
        logs = (path for each in directories if each for path in each.rglob("*.jsonl*"))
        refuse_same_file(output, logs, "--output")


def write_text(path: Path, text: str) -> None:
    with writing(path):
        # Names of files may be no text.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
