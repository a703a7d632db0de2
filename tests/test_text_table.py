# SPDX-License-Identifier: Apache-2.0
"""Tables of every width hold every cell whole."""

import pytest

from sparsebalance_megatron.text_table import shown_ms, text_table

ROWS = [
    {"": "a name", "step\nms": "61,210", "speedup": "1.00"},
    {"": "b", "step\nms": "41.4", "speedup": "12.50"},
]


def test_a_table_that_fits() -> None:
    assert text_table(ROWS, columns=80) == [
        "          step",
        "            ms  speedup",
        "a name  61,210     1.00",
        "b         41.4    12.50",
    ]


@pytest.mark.parametrize("columns", [1, 14, 20])
def test_a_wide_table_becomes_several_that_name_their_rows(columns: int) -> None:
    lines = text_table(ROWS, columns=columns)
    assert [line.split()[-1] for line in lines if line.startswith("a name")] == ["61,210", "1.00"]
    assert max(map(len, lines)) <= max(columns, 14)


@pytest.mark.parametrize(("ms", "text"), [(61210.4, "61,210"), (41.42, "41.4"), (0.0123, "0.0123")])
def test_ms_without_exponents(ms: float, text: str) -> None:
    assert shown_ms(ms) == text
