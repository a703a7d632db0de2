# SPDX-License-Identifier: Apache-2.0
"""Writes docs/COMMANDS.md from the commands' own help: ``python scripts/generate_commands.py``."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sparsebalance_megatron import cli  # noqa: E402

PAGE = ROOT / "docs" / "COMMANDS.md"

_HEAD = """\
# Commands

The commands of `sparse-balance`, from their own help (`python scripts/generate_commands.py`).
What follows `--` goes to Megatron's parser.
"""


def page() -> str:
    """The whole document."""
    sections = "".join(_section(*each) for each in cli.COMMANDS.items())
    return f"{_HEAD}{sections}"


def _section(name: str, line: str) -> str:
    rows = "".join(f"| {left} | {right} |\n" for left, right in _rows(cli.parser_of(name)))
    text = f"{line[0].upper()}{line[1:]}."
    table = f"\n| Argument | Meaning |\n|---|---|\n{rows}" * bool(rows)
    return f"\n## {name}\n\n{text}\n{table}"


def _rows(parser: argparse.ArgumentParser, before: str = "") -> Iterator[tuple[str, str]]:
    """(argument, meaning) of a parser; those of subcommands after the subcommand's name."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from _rows(child, f"{name} ")
            continue
        value = "" if action.nargs == 0 else formatter._format_args(action, _metavar(action))
        shown = " ".join(filter(None, (", ".join(action.option_strings), value)))
        meaning = formatter._expand_help(action) if action.help else ""
        left = f"`{before}{shown}`"
        yield left.replace("|", "\\|"), " ".join(meaning.split()).replace("|", "\\|")


def _metavar(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
