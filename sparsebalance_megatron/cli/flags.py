# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance flags``: the flags of training, those that every run needs first."""

from __future__ import annotations

import textwrap
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator

from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.flags import OTHER_FLAGS, flag_groups, help_texts, values_text

_INDENT = " " * 4
_WIDTH = 96


def add_flags(parser: ArgumentParser) -> None:
    parser.description = (
        "Show the flags of training with --sparse-balance in three groups, and the options besides."
    )


def run(arguments: Namespace) -> int:
    print("\n".join(_lines()))
    return 0


def _lines() -> Iterator[str]:
    texts = help_texts()
    for number, (title, group) in enumerate(flag_groups().items()):
        yield f"\n{title.capitalize()}:" if number else f"{title.capitalize()}:"
        for field in group:
            default = "" if field.default in (None, False) else f" (default: {field.default})"
            yield from _flag(flag_name(field.name), values_text(field) + default, texts[field.name])
        for flag, (values, text) in ({} if number else OTHER_FLAGS).items():
            yield from _flag(flag, values, text)


def _flag(flag: str, values: str, text: str) -> Iterator[str]:
    yield f"  {flag}  {values.replace('`', '')}"
    yield textwrap.fill(text, _WIDTH, initial_indent=_INDENT, subsequent_indent=_INDENT)
