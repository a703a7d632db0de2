# SPDX-License-Identifier: Apache-2.0
"""Printing and writing of commands; each failure is one line."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsebalance_megatron.json_file import refuse_output_over_input
from sparsebalance_megatron.text_table import terminal_columns, wrapped

NOTES_SHOWN = 8


class OutputError(ValueError):
    """A package to show something with is missing, or a file cannot be written."""


def print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def print_wrapped(sentences: Sequence[str]) -> None:
    """Print sentences, each from a line of its own."""
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


def refuse_one_file(outputs: Mapping[str, Path | None]) -> None:
    """Raise if two outputs, by their flags, are one file."""
    given = [(flag, path) for flag, path in outputs.items() if path is not None]
    for (flag, path), (other, other_path) in itertools.combinations(given, 2):
        if os.path.abspath(path) == os.path.abspath(other_path) or (
            path.is_file() and other_path.is_file() and path.samefile(other_path)
        ):
            raise OutputError(f"{flag} and {other} are one file, {path}; choose another for one")


def refuse_output_over_logs(output: Path | None, *directories: Path | None) -> None:
    """Raise if an output would replace a log of the runs that are read."""
    if output is not None:
        logs = (path for each in directories if each for path in each.rglob("*.jsonl*"))
        refuse_output_over_input(output, logs, "--output")


def write_text(path: Path, text: str) -> None:
    with writing(path):
        # Names of files may be no text.
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
