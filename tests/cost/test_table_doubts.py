# SPDX-License-Identifier: Apache-2.0
"""A table that can be read and not be believed says so; a good one says nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import CostTable
from sparsebalance_megatron.cost.table_doubts import doubts

Measure = Callable[..., CostTable]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_measured_table_raises_no_doubt(measure: Measure, noise: float) -> None:
    table = measure(noise)
    assert doubts(table, CostModel.fit(table)) == ()


def test_one_size_only(measure: Measure) -> None:
    table = measure()
    lengths = table.rows[0].lengths_tokens
    table = replace(table, rows=tuple(r for r in table.rows if r.lengths_tokens == lengths))
    (doubt,) = doubts(table, CostModel.fit(table))
    assert "measured at one size only" in doubt
    assert "attention forward, router forward" in doubt


def test_times_that_fall_where_the_work_grows(measure: Measure) -> None:
    table = measure()
    rows = tuple(replace(row, ms_median=1.0 / row.ms_median) for row in table.rows)
    table = replace(table, rows=rows, path="fallen.json")
    (doubt,) = doubts(table, CostModel.fit(table))
    assert doubt.startswith("cost table fallen.json: times do not grow as work does")
