# SPDX-License-Identifier: Apache-2.0
"""Tables of plain text and bars of progress, for terminals and logs of any width."""

import itertools
import math
import operator
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

_LONGEST_LINE_CHARACTERS = 1000


def text_table(
    rows: Sequence[Mapping[str, str]], *, columns: int | None = None, keys: int = 1
) -> list[str]:
    """Lines of text: cells under their headings, of which each row has the same.

    Cells are right-aligned, those without a heading left-aligned. A table wider than ``columns``
    becomes several, of which each repeats the first ``keys`` columns.
    """
    most = math.inf if columns is None else columns
    height = max(heading.count("\n") for heading in rows[0]) + 1
    table = []
    for heading in rows[0]:
        head = heading.split("\n")
        cells = [*[""] * (height - len(head)), *head, *(row[heading] for row in rows)]
        width = max(map(len, cells))
        table.append([cell.rjust(width) if heading else cell.ljust(width) for cell in cells])

    def joined(part: Sequence[Sequence[str]], gap: str) -> list[str]:
        return [gap.join(line) for line in zip(*table[:keys], *part, strict=True)]

    gap = "  " if len(joined(table[keys:], "  ")[0]) <= most else " "
    parts = [[table[keys]]]
    for column in table[keys + 1 :]:
        if len(joined([*parts[-1], column], gap)[0]) <= most:
            parts[-1].append(column)
        else:
            parts.append([column])
    lines: list[str] = []
    for part in parts:
        shown = [line.rstrip() for line in joined(part, gap)]
        lines += [*[""] * bool(lines), *itertools.dropwhile(operator.not_, shown)]
    return lines


def progress_bar(name: str, total: int, unit: str) -> Any:
    """A bar on standard error of computations that take more than five seconds; ``update()`` after
    each part. Logs get a line every ten seconds."""
    from tqdm import tqdm

    how: dict[str, Any] = {"mininterval": 10.0, "ncols": 70, "file": _Lines()}
    if sys.stderr.isatty():
        how = {"mininterval": 0.2, "leave": False}
    return tqdm(desc=name, total=total, unit=unit, delay=5.0, **how)


class _Lines:
    """Standard error, with every state of a bar on a line of its own."""

    def write(self, text: str) -> None:
        if state := text.strip():
            sys.stderr.write(f"{state}\n")

    def flush(self) -> None:
        sys.stderr.flush()


def terminal_columns() -> int:
    """Characters of a terminal's line; 80 where there is none."""
    return max(20, shutil.get_terminal_size().columns)


def printable(text: str) -> str:
    """A text whose line breaks and other control characters are spelt out."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def one_line(text: str) -> str:
    """A text without line breaks and other control characters, cut where no user reads on."""
    shown = printable(text)
    if len(shown) > _LONGEST_LINE_CHARACTERS:
        shown = f"{shown[:_LONGEST_LINE_CHARACTERS]}..."
    return shown


def wrapped(text: str, columns: int) -> list[str]:
    """Lines of a sentence, at most so wide where words allow."""
    return textwrap.wrap(text, columns, break_long_words=False, break_on_hyphens=False)


def shown_ms(ms: float) -> str:
    """Milliseconds with three digits or more, and no exponent: 61,210 or 41.4."""
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"
