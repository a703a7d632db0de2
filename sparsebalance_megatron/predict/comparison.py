# SPDX-License-Identifier: Apache-2.0
"""Jobs compared with dense attention: one planned in several ways, or several layouts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.cost.model import memory_gib
from sparsebalance_megatron.plan.step_plan import PlanError
from sparsebalance_megatron.predict.memory import memory_at_most
from sparsebalance_megatron.predict.outcome import (
    Outcome,
    Watch,
    predict,
)
from sparsebalance_megatron.predict.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """One way to plan, or one layout; ``names`` tell it from others, ``outcome`` is None where it
    was not planned."""

    names: tuple[str, ...]
    workload: Workload
    outcome: Outcome | None = None

    @cached_property
    def at_most_bytes(self) -> float:
        """Memory of the fullest stage, with every micro-batch at the token cap."""
        return max(stage.total_bytes for stage in memory_at_most(self.workload))

    @property
    def gpu_bytes(self) -> float:
        """Memory of the device whose times these are; infinite where nobody knows it."""
        return GIBIBYTE * (memory_gib(self.workload.cost.device) or math.inf)

    @property
    def fits(self) -> bool:
        return self.at_most_bytes <= self.gpu_bytes

    @property
    def ms(self) -> float:
        """Time of a step, infinite where it was not planned."""
        return math.inf if self.outcome is None else self.outcome.makespan_ms


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Rows of a table.

    Attributes:
        given: what the flags train; of layouts, the fastest that is not dense, if any is.
        dense: the fastest of dense attention.
        refused: names of rows that cannot be planned, and why.
    """

    rows: tuple[TableRow, ...]
    given: TableRow
    dense: TableRow
    refused: Mapping[tuple[str, ...], str]


def compared_steps(rows: Sequence[TableRow]) -> int:
    """Steps that are planned to compare rows, at most."""
    return sum(len(row.workload.batches) for row in rows)


def compare(rows: Sequence[TableRow], given: tuple[str, ...], watch: Watch) -> Comparison:
    """Plan all rows, of which some are dense, and compare them with the first.

    Raises:
        PlanError: the given row, or no dense one, can be planned.
    """
    found, refused = _planned(rows, watch, relative=True)
    if given in refused:
        raise PlanError(refused[given])
    (chosen,) = (row for row in found if row.names == given)
    return _compared(found, chosen, refused, watch)


def worth_planning(rows: Sequence[TableRow]) -> list[TableRow]:
    """The rows that fit, or all where none does."""
    return [row for row in rows if row.fits] or list(rows)


def compare_layouts(rows: Sequence[TableRow], watch: Watch) -> Comparison:
    """Plan the rows that fit, of which some are dense, and put the fastest first; others are last.

    Raises:
        PlanError: no dense row can be planned.
    """
    wanted = worth_planning(rows)
    found, refused = _planned(wanted, watch, relative=False)
    found.sort(key=lambda row: row.ms)
    sparse = [row for row in found if not row.workload.is_dense]
    left = [row for row in rows if row.names not in {each.names for each in wanted}]
    compared = _compared(found, (sparse or found)[0], refused, watch)
    left.sort(key=lambda row: row.at_most_bytes)
    return replace(compared, rows=(*found, *left))


def _planned(
    rows: Iterable[TableRow], watch: Watch, *, relative: bool
) -> tuple[list[TableRow], dict[tuple[str, ...], str]]:
    found: list[TableRow] = []
    refused = {}
    for row in rows:
        first = found[0].outcome if relative and found else None
        try:
            outcome = predict(row.workload, baseline=first, watch=watch)
        except PlanError as error:
            refused[row.names] = str(error)
            continue
        found.append(replace(row, outcome=outcome))
    if not any(row.workload.is_dense for row in found):
        raise PlanError(next(iter(refused.values())))
    return found, refused


def _compared(
    rows: Sequence[TableRow],
    given: TableRow,
    refused: Mapping[tuple[str, ...], str],
    watch: Watch,
) -> Comparison:
    dense = min((row for row in rows if row.workload.is_dense), key=lambda row: row.ms)
    return Comparison(rows=tuple(rows), given=given, dense=dense, refused=refused)
