# SPDX-License-Identifier: Apache-2.0
"""Documents of text: functions and classes of Python's standard library, a token a byte."""

import ast
import sysconfig
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np

from quality.documents import Document

SHORTEST_BYTES, LONGEST_BYTES = 64, 4096
VOCABULARY = 256
_HELD_OUT_PARTS = 10
"""One of so many parts is held out."""


@cache
def texts(held_out: bool) -> tuple[bytes, ...]:
    """Source of the functions and classes at the top of the modules that Python brings, without
    those under ``test``; held out are those whose checksum divides by ``_HELD_OUT_PARTS``."""
    folder = Path(sysconfig.get_path("stdlib"))
    found = set()
    for path in folder.rglob("*.py"):
        if {"test", "tests", "site-packages"}.isdisjoint(path.relative_to(folder).parts):
            source = path.read_bytes()
            lines = source.splitlines(keepends=True)
            for node in ast.parse(source).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef):
                    text = b"".join(lines[node.lineno - 1 : node.end_lineno])
                    if SHORTEST_BYTES < len(text) <= LONGEST_BYTES:
                        found.add(text)
    return tuple(
        text for text in sorted(found) if (zlib.crc32(text) % _HELD_OUT_PARTS == 0) == held_out
    )


def source_text(generator: np.random.Generator, *, held_out: bool) -> Iterator[Document]:
    """All documents in random order, again and again; ``places`` are positions."""
    every = texts(held_out)
    while True:
        for number in generator.permutation(len(every)):
            tokens = np.frombuffer(every[number], dtype=np.uint8).astype(np.int64)
            inputs = len(tokens) - 1
            yield Document(
                tokens=tokens, scored=np.ones(inputs, dtype=bool), places=np.arange(inputs)
            )
