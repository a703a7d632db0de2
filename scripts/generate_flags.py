# SPDX-License-Identifier: Apache-2.0
"""Writes docs/FLAGS.md from ``SparseBalanceConfig``: ``python scripts/generate_flags.py``."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sparsebalance_megatron import config  # noqa: E402

PAGE = ROOT / "docs" / "FLAGS.md"

_HEAD = """\
# Flags

Made from [`SparseBalanceConfig`](../sparsebalance_megatron/config.py) by
`python scripts/generate_flags.py`; a test compares. `--help` prints the same in the group "sparse
balance". Which one to turn when: [TUNING.md](TUNING.md).

| Flag | Values | Default | Meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole document."""
    help_texts = dict(_help_texts())
    return _HEAD + "".join(_row(field, help_texts[field.name]) for field in fields(_config_class()))


def _config_class() -> Any:
    return config.SparseBalanceConfig


def _row(field: Field[Any], help_text: str) -> str:
    flag = config.flag_name(field.name)
    default = {None: "-", False: "off"}.get(field.default) or f"`{field.default}`"
    help_text = field.metadata.get("argparse_meta", {}).get("help", help_text)
    return f"| `{flag}` | {_values(field)} | {default} | {help_text} |\n"


def _values(field: Field[Any]) -> str:
    """What may follow the flag."""
    meta = field.metadata.get("argparse_meta", {})
    if "metavar" in meta:
        value = f"`{meta['metavar']}`"
        return f"{value}, or nothing" if meta.get("nargs") == "?" else value
    kind = field.type
    if get_origin(kind) is UnionType:
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return {bool: "no value", int: "integer", float: "number", str: "text"}[kind]


def _help_texts() -> Iterator[tuple[str, str]]:
    """(field, the text under it), from the source: Python keeps no such text."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    name = _config_class().__name__
    (definition,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name
    )
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            yield node.target.id, " ".join(str(after.value.value).split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
