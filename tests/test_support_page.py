# SPDX-License-Identifier: Apache-2.0
"""docs/SUPPORT.md names tests that exist, and every refusal there is."""

from __future__ import annotations

import re
from pathlib import Path

from runtime.test_matrix import LAYOUTS

from sparsebalance_megatron.runtime.refusals import REFUSALS

REPOSITORY = Path(__file__).parents[1]
SUPPORTED, _, REFUSED = (
    (REPOSITORY / "docs" / "SUPPORT.md").read_text(encoding="utf-8").partition("## Refused")
)


def test_named_tests_exist() -> None:
    files = set(re.findall(r"`((?:tests|scripts)/[\w/.]+)`", SUPPORTED + REFUSED))
    assert len(files) > 5
    assert [name for name in files if not (REPOSITORY / name).is_file()] == []
    layouts = set(re.findall(r"M\[([\w-]+)\]", SUPPORTED)) - {"name"}
    assert layouts == set(LAYOUTS)


def test_every_row_says_where_it_was_tested() -> None:
    rows = [line for line in SUPPORTED.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    for row in rows:
        feature, cpu, gpu = (cell.strip() for cell in row.strip("|").split("|"))
        if feature.startswith("**"):
            assert not cpu and not gpu
            continue
        assert re.search(r"M\[|`(tests|scripts)/|every test here|^untested", cpu), row
        assert gpu == "not yet" or re.fullmatch(r"\d{4}-\d\d-\d\d", gpu), row


def test_the_list_of_refusals_is_complete() -> None:
    listed = "\n".join(line for line in REFUSED.splitlines() if line.startswith(("- ", "  ")))
    assert sorted(re.findall(r"`([^`]+)`", listed)) == sorted(refusal.flag for refusal in REFUSALS)
