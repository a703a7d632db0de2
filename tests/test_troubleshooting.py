# SPDX-License-Identifier: Apache-2.0
"""docs/TROUBLESHOOTING.md explains what the package raises.

That its table of errors is the source's, :mod:`test_support` checks.
"""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[1] / "docs" / "TROUBLESHOOTING.md").read_text("utf-8")


def test_every_error_has_a_section() -> None:
    """In its heading, or in what follows a heading, beside the row of the table."""
    _, table, sections = re.split("<!-- .* -->", PAGE)
    errors = re.findall(r"^\| (`\w+`) \|", table, re.M)
    assert len(errors) > 10
    assert [name for name in errors if name not in sections] == []


def test_every_item_begins_with_its_message() -> None:
    items = re.findall(r"^- (.*)$", PAGE, re.M)
    assert len(items) > 40
    assert [item for item in items if not item.startswith("`")] == []
