# SPDX-License-Identifier: Apache-2.0
"""Every message that docs/TROUBLESHOOTING.md quotes is one that the package can print."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "TROUBLESHOOTING.md"
SOURCES = sorted((REPOSITORY / "sparsebalance_megatron").rglob("*.py"))
PLACEHOLDER = re.compile(r"<[^<>]*>")
OWN_FLAG = re.compile(r"--sparse-balance(-[a-z]+)*")
_FILLED_IN = "\0"


def quoted_messages() -> list[str]:
    """The code spans in the first line of every list item."""
    first_lines = re.findall(r"^- (.*)$", PAGE.read_text(), re.M)
    spans = [re.findall(r"(`+)(.+?)\1(?!`)", line) for line in first_lines]
    assert all(spans), "every item begins with a message"
    return [message for line in spans for _, message in line]


def fragments(message: str) -> list[str]:
    """The words between placeholders; a flag of ours alone may have been filled in."""
    parts = [part.strip(" ;:,.()=") for part in PLACEHOLDER.split(message)]
    return [part for part in parts if part and not OWN_FLAG.fullmatch(part)]


@cache
def texts() -> dict[Path, tuple[str, ...]]:
    """By file, its strings but docstrings, with a mark for what is filled in."""
    return {path: tuple(_strings(ast.parse(path.read_text()))) for path in SOURCES}


def _strings(tree: ast.Module) -> list[str]:
    found = []
    ignored = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            ignored |= {id(part) for part in node.values}
            parts = (str(getattr(part, "value", "")) for part in node.values)
            constant = (isinstance(part, ast.Constant) for part in node.values)
            found += ["".join(p if c else _FILLED_IN for p, c in zip(parts, constant, strict=True))]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found += [node.value] if id(node) not in ignored else []
    return found


def is_printed(message: str) -> bool:
    """Whether one file has every fragment of it, each within one string."""
    wanted = fragments(message)
    return bool(wanted) and any(
        all(any(fragment in text for text in strings) for fragment in wanted)
        for strings in texts().values()
    )


def test_quotes_are_found() -> None:
    assert len(quoted_messages()) > 40


@pytest.mark.parametrize("message", quoted_messages())
def test_quoted_messages_occur_in_the_source(message: str) -> None:
    # Nothing but placeholders says nothing: only the frames of all flags' messages may be that.
    assert is_printed(message) or message == "<flag> <value>: <rule>"


@pytest.mark.parametrize(
    "message",
    [
        "<path>: no such table; look for it elsewhere",
        "<place>: cannot be written (<reason>); check the path, or <remedy>",
        "step <n>: <n> ranks executed a different plan than rank 0",
        "<flag> <value>",
    ],
)
def test_invented_messages_do_not(message: str) -> None:
    assert not is_printed(message)


def test_every_error_of_the_package_is_explained() -> None:
    """By its class; those whose name begins with an underscore never leave their file."""
    classes = {
        node.name
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
        and re.fullmatch(r"[A-Z]\w*Error", node.name)
        and any(ast.unparse(base).endswith(("Error", "Exception")) for base in node.bases)
    }
    text = PAGE.read_text()
    assert sorted(name for name in classes if name not in text) == []
