# SPDX-License-Identifier: Apache-2.0
"""Writes what the source knows into documents: ``python scripts/generate_support.py``.

The refusals in docs/SUPPORT.md and the files to start with in CONTRIBUTING.md, each between two
marks; and docs/support.json, the tables of docs/SUPPORT.md for programs.
"""

import ast
import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sparsebalance_megatron.megatron.unsupported import MODEL, SEGMENTS, TRAINING  # noqa: E402

PACKAGE = ROOT / "sparsebalance_megatron"
DOCS = ROOT / "docs"
FIRST_FILES = (
    *("run/trainer", "run/micro_batches", "run/forward_step"),
    *("learn/step_planner", "plan/planner"),
    *("plan/step_costs", "plan/search/annealing", "plan/pipeline/simulator", "plan/budgets/policy"),
    *("plan/step_plan", "megatron/core_attention", "attention/api"),
    *("run/run", "run/step_reducer"),
)
"""Where to begin reading, in the order in which a step passes them."""
REFUSALS = {
    "Of the model, also where a trainer has its own loop": MODEL,
    "Of training": TRAINING,
    "With `--sparse-balance-max-segments` above 1": SEGMENTS,
}
_MARKED = re.compile(
    r"(<!-- made by scripts/generate_support.py -->\n).*?(<!-- end -->)", re.DOTALL
)


def pages() -> dict[Path, str]:
    """The documents as they should be."""
    parts = {DOCS / "SUPPORT.md": refusals(), ROOT / "CONTRIBUTING.md": first_files()}
    filled = {path: _filled(path, part) for path, part in parts.items()}
    support = tables(filled[DOCS / "SUPPORT.md"])
    support["Refused"] = [
        {"With `--sparse-balance`": " ".join(names), "What to do": remedy}
        for refused in REFUSALS.values()
        for remedy, names in _by_remedy(refused).items()
    ]
    return filled | {DOCS / "support.json": json.dumps(support, indent=1) + "\n"}


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """The rows of a page's tables by section, by the columns' names."""
    found: dict[str, list[dict[str, str]]] = {}
    for title, text in re.findall(r"^##+ (.+)\n((?:(?!##).*\n)*)", page, re.MULTILINE):
        for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
            head, _, *rows = (
                [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
                for line in table.splitlines()
            )
            found.setdefault(title, []).extend(dict(zip(head, row, strict=True)) for row in rows)
    return found


def refusals() -> str:
    """Lists of flags with what to use instead: of models, of training, of segments."""
    parts = []
    for title, refused in REFUSALS.items():
        lines = (f"- {' '.join(flags)}: {what}\n" for what, flags in _by_remedy(refused).items())
        parts.append(f"{title}:\n\n{''.join(lines)}\n")
    return "".join(parts)


def first_files() -> str:
    """A table of the files to start with, and what their docstrings say of them."""
    return _table(("File", "What it has"), ((f"`{each}.py`", _what(each)) for each in FIRST_FILES))


def _what(module: str) -> str:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text(encoding="utf-8"))
    return " ".join((ast.get_docstring(tree) or "").partition("\n\n")[0].split())


def _filled(page: Path, part: str) -> str:
    text, count = _MARKED.subn(
        lambda match: f"{match[1]}{part}{match[2]}", page.read_text(encoding="utf-8")
    )
    if count != 1:
        raise ValueError(f"{page}: expected one marked part, found {count}")
    return text


def _by_remedy(refused: Mapping[str, str]) -> dict[str, list[str]]:
    """Remedies and their flags; a message has the reason before the remedy."""
    flags: dict[str, list[str]] = {}
    for flag, message in refused.items():
        flags.setdefault(message.rpartition("; ")[2], []).append(f"`{flag}`")
    return flags


def _table(head: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    lines = (f"| {' | '.join(cells)} |\n" for cells in (head, ("---", "---"), *rows))
    return "".join(lines).replace("| --- | --- |", "|---|---|")


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text, encoding="utf-8")
        print(page)
