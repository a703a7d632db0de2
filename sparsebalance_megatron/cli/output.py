# SPDX-License-Identifier: Apache-2.0
"""Printing and writing of commands; each failure is one line."""

import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsebalance_megatron.json_file import refuse_same_file
from sparsebalance_megatron.text_table import terminal_columns, wrapped


class OutputError(ValueError):
    """A file cannot be written."""


def print_json(document: Mapping[str, Any]) -> None:
    print(json.dumps(document, indent=2))


def print_wrapped(sentences: Sequence[str]) -> None:
    for sentence in sentences:
        print("\n".join(wrapped(sentence, terminal_columns())))


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make the folder of a file that is written inside; failures become :class:`OutputError`."""
    if path == Path("-"):
        raise OutputError("-: stands for no file here; name one, or use --json where there is one")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        # Of a folder that is copied, one error holds those of its files.
        causes = error.args[0] if isinstance(error, shutil.Error) else ()
        reason = error.strerror or next((cause[2] for cause in causes), error)
        raise OutputError(f"{path}: cannot be written: {reason}") from error


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
    """Write a file whole: until all of it is on the disk, an older one stays."""
    # Names of files may be no text.
    contents = text.encode("utf-8", errors="backslashreplace")
    with writing(path):
        if path.exists() and not path.is_file():  # a pipe, or /dev/stdout
            path.write_bytes(contents)
            return
        target = Path(os.path.realpath(path))
        if target.is_symlink():
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        partial = target.with_name(f"{target.name[:200]}.partial-{os.getpid()}")
        try:
            partial.write_bytes(contents)
            if target.exists():
                shutil.copymode(target, partial)
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
