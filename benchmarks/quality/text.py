# SPDX-License-Identifier: Apache-2.0
"""Documents of bytes: pieces of the Python standard library's sources."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from quality.documents import Document, log_uniform_length

VOCABULARY = 256
HELD_OUT_EVERY = 10
"""One in so many files, in alphabetical order, is never trained on."""


@cache
def source_files() -> tuple[Path, ...]:
    """Modules of the standard library outside of its test suites, in alphabetical order."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [*root.glob("*.py"), *root.glob("*/*.py")]
    kept = [path for path in found if path.parent.name not in ("test", "site-packages")]
    return tuple(sorted(kept))


def files_of(*, held_out: bool) -> tuple[Path, ...]:
    """The files of one side of the split."""
    return tuple(
        path
        for number, path in enumerate(source_files())
        if (number % HELD_OUT_EVERY == 0) == held_out
    )


def text_documents(
    generator: np.random.Generator,
    files: Sequence[Path],
    *,
    shortest_tokens: int,
    longest_tokens: int,
) -> Iterator[Document]:
    """Pieces of files without end: of a random file the beginning, or a line further on.

    Every label counts; ``places`` are positions.
    """
    texts = [np.frombuffer(path.read_bytes(), dtype=np.uint8) for path in files]
    texts = [text for text in texts if len(text) > shortest_tokens]
    while True:
        text = texts[generator.integers(len(texts))]
        length = log_uniform_length(generator, shortest_tokens, longest_tokens)
        newlines = np.flatnonzero(text[: len(text) - shortest_tokens] == ord("\n")) + 1
        starts = np.concatenate([[0], newlines])
        first = int(starts[generator.integers(len(starts))])
        tokens = text[first : first + length + 1].astype(np.int64)
        if len(tokens) > shortest_tokens:
            inputs = len(tokens) - 1
            yield Document(
                tokens=tokens, scored=np.ones(inputs, dtype=bool), places=np.arange(inputs)
            )
