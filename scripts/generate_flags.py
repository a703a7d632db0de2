# SPDX-License-Identifier: Apache-2.0
"""Writes docs/FLAGS.md from ``SparseBalanceConfig``: ``python scripts/generate_flags.py``."""

import ast
import inspect
import sys
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sparsebalance_megatron import flags  # noqa: E402
from sparsebalance_megatron.config import FILE_FLAG, SparseBalanceConfig, flag_name  # noqa: E402

PAGE = ROOT / "docs" / "FLAGS.md"

_HEAD = """\
# Flags

`--help` of training shows the same (made by `python scripts/generate_flags.py`).
When to change which: [TUNING.md](TUNING.md). Flags win over options on the command line
(`--sparse-balance-config plan-ms=100`), these over its file, and that over
`--sparse-balance-mode`.
"""
_TABLE = """
## {title}

| Flag | Values | Default | Meaning |
|---|---|---|---|
"""


def page() -> str:
    """The whole document."""
    return _HEAD + "".join(_lines())


def _lines() -> Iterator[str]:
    texts = _help_texts()
    for number, (title, group) in enumerate(flags.flag_groups().items()):
        yield _TABLE.format(title=title.capitalize())
        for field in group:
            default = {None: "-", False: "off"}.get(field.default) or f"`{field.default}`"
            values = _values(field)
            name = flag_name(field.name).removeprefix(f"{FILE_FLAG} ")
            yield f"| `{name}` | {values} | {default} | {texts[field.name]} |\n"
        for flag, (values, text) in ({} if number else flags.OTHER_FLAGS).items():
            yield f"| `{flag}` | {values} | - | {text} |\n"


def _values(field: Field[Any]) -> str:
    """What may follow a flag, in Markdown."""
    meta = field.metadata.get("argparse_meta", {})
    if "metavar" in meta:
        value = f"`{meta['metavar']}`"
        return f"{value}, or nothing" if meta.get("nargs") == "?" else value
    kind: Any = field.type
    if get_origin(kind) is UnionType:
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(kind))
    return {bool: "no value", int: "integer", float: "number", str: "text"}[kind]


def _help_texts() -> dict[str, str]:
    """Field -> the text under it, from the source: Python keeps no such text."""
    (definition,) = ast.parse(inspect.getsource(SparseBalanceConfig)).body
    assert isinstance(definition, ast.ClassDef)
    own = {each.name: each for each in fields(SparseBalanceConfig)}
    texts = {}
    for node, after in zip(definition.body, definition.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            name = node.target.id
            given = own[name].metadata.get("argparse_meta", {}).get("help")
            texts[name] = given or " ".join(str(after.value.value).split())
    return texts


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
