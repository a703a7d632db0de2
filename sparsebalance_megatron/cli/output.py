# SPDX-License-Identifier: Apache-2.0
"""Printing and writing of commands; each failure is one line."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from sparsebalance_megatron.json_file import refuse_output_over_input
from sparsebalance_megatron.text_table import terminal_columns, wrapped

NOTES_SHOWN = 8


class OutputError(ValueError):
    """A package to show something with is missing, or a file cannot be written."""


def print_json(document: Mapping[str, Any]) -> None:
    """Print a document."""
    print(json.dumps(document, indent=2))


def print_wrapped(sentences: Sequence[str]) -> None:
    """Print sentences, each from a line of its own."""
    for sentence in sentences:
        print("\n".join(wrapped(sentence, terminal_columns())))


def print_notes(notes: Sequence[str]) -> None:
    """Print the first few, and how many more there are."""
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


def refuse_output_over_logs(output: Path | None, *directories: Path | None) -> None:
    """Raise if an output would replace a log of the runs that are read.

    Raises:
        ConfigError: naming both files.
    """
    if output is not None:
        logs = (path for each in directories if each for path in each.rglob("*.jsonl"))
        refuse_output_over_input(output, logs, "--output")


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write into; a pipe without a reader is refused, not waited for.

    Raises:
        OutputError: with the reason, if it cannot be written.
    """
    with writing(path):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
        os.set_blocking(descriptor, True)
        with os.fdopen(descriptor, "wb") as stream:
            yield stream


def write_text(path: Path, text: str) -> None:
    """Write a whole file.

    Raises:
        OutputError: with the reason, if it cannot be written.
    """
    with output_file(path) as stream:
        stream.write(text.encode())
