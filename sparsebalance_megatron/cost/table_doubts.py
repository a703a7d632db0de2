# SPDX-License-Identifier: Apache-2.0
"""What makes a cost table that can be read hard to believe."""

from __future__ import annotations

from sparsebalance_megatron.cost.model import CostModel, fit_errors
from sparsebalance_megatron.cost.table import CostTable

_DOUBTFUL_ERROR = 0.4
"""Median relative error of a fit. Times of a busy machine stay below half of it; times that fall
where the work grows do not."""
_REMEDY = "measure again on an idle machine with `sparse-balance profile`"


def doubts(table: CostTable, model: CostModel) -> tuple[str, ...]:
    """Reasons to measure again, one sentence each; none for a table as ``profile`` writes it.

    Args:
        model: fitted to the table.
    """
    sizes: dict[tuple[str, str], set[tuple[int, ...]]] = {}
    for row in table.rows:
        sizes.setdefault((row.part, row.direction), set()).add(row.lengths_tokens)
    place = "cost table" if table.path is None else f"cost table {table.path}"
    single = [f"{part} {direction}" for (part, direction), each in sizes.items() if len(each) == 1]
    errors = fit_errors(model, table).items()
    off = [
        f"{part} {direction} by {error.median:.0%}"
        for (part, direction), error in errors
        if error.median > _DOUBTFUL_ERROR
    ]
    found = []
    if single:
        found.append(
            f"{place}: measured at one size only, so that times at any other are a guess: "
            f"{', '.join(single)}; {_REMEDY}"
        )
    if off:
        found.append(
            f"{place}: times do not grow as work does; the fit is off, at the median, in "
            f"{', '.join(off)}; {_REMEDY}"
        )
    return tuple(found)
