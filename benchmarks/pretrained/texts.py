# SPDX-License-Identifier: Apache-2.0
"""Text that lies on every machine: Python's own library and what installed packages ship."""

import random
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from email.message import Message
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from pydoc_data.topics import topics
from typing import cast

Encode = Callable[[str], list[int]]
"""Text -> tokens, none added."""

_LEAST_CHARACTERS = 20_000
"""The least length of a licence or a description: shorter ones are alike."""
_FORM_LETTERS = ("GNU GENERAL PUBLIC", "Apache License")
_LEAST_PARAGRAPH, _LETTERS = 100, 0.93
"""Characters of a paragraph of prose, and the share of them that are letters or spaces."""


@cache
def python_sources() -> tuple[str, ...]:
    """Modules of the running interpreter's standard library, in order of their names."""
    library = Path(sysconfig.get_paths()["stdlib"])
    # Generated modules are tables.
    paths = sorted(path for path in library.glob("*.py") if "sysconfigdata" not in path.name)
    return tuple(path.read_text("utf-8", "replace") for path in paths)


@cache
def english_texts() -> tuple[str, ...]:
    """Chapters of Python's documentation; licences and descriptions of installed packages."""
    return (*(topics[name] for name in sorted(topics)), *sorted(set(_shipped())))


@cache
def prose_texts() -> tuple[str, ...]:
    """The paragraphs of English texts that are neither lists nor tables nor code."""
    texts = ("\n\n".join(filter(_is_prose, text.split("\n\n"))) for text in english_texts())
    return tuple(text for text in texts if text)


def _is_prose(paragraph: str) -> bool:
    letters = sum(character.isalpha() or character.isspace() for character in paragraph)
    return len(paragraph) >= _LEAST_PARAGRAPH and letters >= _LETTERS * len(paragraph)


def _shipped() -> Iterator[str]:
    for package in distributions():
        texts = [str(cast(Message, package.metadata).get_payload() or "")]
        for path in package.files or ():
            if "licen" in path.name.lower() and path.suffix in ("", ".txt", ".md", ".rst"):
                place = Path(str(path.locate()))
                if place.is_file():
                    texts.append(place.read_text("utf-8", "replace"))
        for text in texts:
            if len(text) >= _LEAST_CHARACTERS and not any(x in text for x in _FORM_LETTERS):
                yield text


def shuffled(texts: Sequence[str], seed: int, *, backwards: bool) -> Iterator[str]:
    """All texts in an order of the seed, or from its end."""
    order = list(texts)
    random.Random(seed).shuffle(order)
    return iter(reversed(order) if backwards else order)


def filled(texts: Iterator[str], encode: Encode, tokens: int) -> list[int]:
    """Tokens of the next texts, one after another, until there are enough.

    Raises:
        ValueError: there is too little text.
    """
    found: list[int] = []
    while len(found) < tokens:
        text = next(texts, None)
        if text is None:
            raise ValueError(f"texts: too few for another document of {tokens} tokens")
        found += encode(text + "\n\n")
    return found[:tokens]
