# SPDX-License-Identifier: Apache-2.0
"""More than a thousand cases of bad input: no traceback, no hang, none silent, none unclear."""

from __future__ import annotations

import pytest
from bad_inputs.survey import survey

LEAST_CASES = 1000


@pytest.mark.timeout(1800)
def test_every_case_ends_well() -> None:
    found = survey()
    assert sum(counts.total() for counts in found.values()) >= LEAST_CASES
    assert {group: dict(counts) for group, counts in found.items()} == {
        group: {"fine": counts.total()} for group, counts in found.items()
    }
