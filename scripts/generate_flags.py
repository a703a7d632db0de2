# SPDX-License-Identifier: Apache-2.0
"""Writes docs/FLAGS.md from ``SparseBalanceConfig``: ``python scripts/generate_flags.py``."""

import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sparsebalance_megatron import flags  # noqa: E402
from sparsebalance_megatron.config import FILE_FLAG, flag_name  # noqa: E402

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
    texts = flags.help_texts()
    for number, (title, group) in enumerate(flags.flag_groups().items()):
        yield _TABLE.format(title=title.capitalize())
        for field in group:
            default = {None: "-", False: "off"}.get(field.default) or f"`{field.default}`"
            values = flags.values_text(field)
            name = flag_name(field.name).removeprefix(f"{FILE_FLAG} ")
            yield f"| `{name}` | {values} | {default} | {texts[field.name]} |\n"
        for flag, (values, text) in ({} if number else flags.OTHER_FLAGS).items():
            yield f"| `{flag}` | {values} | - | {text} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE)
