# SPDX-License-Identifier: Apache-2.0
"""Tables of plain text and bars of progress, for terminals and logs of any width."""

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
    headings = list(rows[0])
    widths = {
        heading: max(len(text) for text in (*heading.split("\n"), *(row[heading] for row in rows)))
        for heading in headings
    }
    fits_widely = columns is None or sum(widths.values()) + 2 * len(headings) - 2 <= columns
    gap = "  " if fits_widely else " "
    parts = [list[str]()]
    for heading in headings[keys:]:
        wanted = [*headings[:keys], *parts[-1], heading]
        width = sum(widths[each] + len(gap) for each in wanted) - len(gap)
        if parts[-1] and columns is not None and width > columns:
            parts.append([])
        parts[-1].append(heading)
    lines: list[str] = []
    for part in parts:
        shown = [*headings[:keys], *part]
        heads = [heading.split("\n") for heading in shown]
        height = max(map(len, heads))
        cells = [[""] * (height - len(head)) + head for head in heads]
        lines += [""] if lines else []
        for line in (*zip(*cells, strict=True), *([row[each] for each in shown] for row in rows)):
            padded = (
                text.rjust(widths[each]) if each else text.ljust(widths[each])
                for text, each in zip(line, shown, strict=True)
            )
            lines.append(gap.join(padded).rstrip())
    return lines


def progress_bar(name: str, total: int, unit: str) -> Any:
    """A bar on standard error of computations that take more than five seconds; ``update()`` after
    each part. Logs get a line every ten seconds."""
    from tqdm import tqdm

    if sys.stderr.isatty():
        return tqdm(desc=name, total=total, unit=unit, delay=5.0, mininterval=0.2, leave=False)
    return tqdm(
        desc=name, total=total, unit=unit, delay=5.0, mininterval=10.0, ncols=70, file=_Lines()
    )


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
