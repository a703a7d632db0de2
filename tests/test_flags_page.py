# SPDX-License-Identifier: Apache-2.0
"""docs/FLAGS.md is what ``python scripts/generate_flags.py`` would write now."""

from __future__ import annotations

import runpy
from dataclasses import fields
from pathlib import Path

from sparsebalance_megatron.config import SparseBalanceConfig, flag_name

REPOSITORY = Path(__file__).parents[1]


def test_page_is_up_to_date() -> None:
    page = runpy.run_path(str(REPOSITORY / "scripts" / "generate_flags.py"))["page"]()
    assert (REPOSITORY / "docs" / "FLAGS.md").read_text() == page, (
        "run `python scripts/generate_flags.py`"
    )


def test_every_flag_has_a_row_of_its_own() -> None:
    rows = (REPOSITORY / "docs" / "FLAGS.md").read_text().splitlines()
    for field in fields(SparseBalanceConfig):
        (row,) = (row for row in rows if row.startswith(f"| `{flag_name(field.name)}` |"))
        assert row.count("|") == 5 and len(row.split("|")[4]) > 20
