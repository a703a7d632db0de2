# SPDX-License-Identifier: Apache-2.0
"""A job compared with dense attention: planned in several ways, or in several layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.cost.rates import memory_gib
from sparsebalance_megatron.plan.step_plan import PlanError
from sparsebalance_megatron.predict.memory import memory_at_most
from sparsebalance_megatron.predict.outcome import (
    BREAK_EVEN_STEPS,
    Outcome,
    Watch,
    break_even_slowness,
    predict,
    predict_rows,
)
from sparsebalance_megatron.predict.rows import DENSE, EXACT, ROWS, given_row, rows_of
from sparsebalance_megatron.predict.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A workload in several ways.

    Attributes:
        outcomes: by the names of :func:`.rows_of`, dense attention in order of arrival first.
        given: the row that is planned as the workload is.
        dense: the fastest row with dense attention.
        slowness: see :func:`.break_even_slowness`; None where the given row is dense.
        meanings: what every row is.
    """

    workload: Workload
    outcomes: Mapping[str, Outcome]
    given: str
    dense: str
    slowness: float | None
    meanings: Mapping[str, str]

    def over_dense(self, name: str) -> float:
        """How many times as fast as the fastest dense row a row is."""
        return self.outcomes[self.dense].makespan_ms / self.outcomes[name].makespan_ms


def compared_steps(workload: Workload, *, every: bool = False) -> int:
    """Steps that :func:`compare` plans, at most."""
    return len(workload.batches) * len(rows_of(workload, every=every)) + BREAK_EVEN_STEPS


def compare(workload: Workload, *, every: bool = False, watch: Watch) -> Comparison:
    """Plan a workload in every way.

    Args:
        every: further rows too.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    rows = rows_of(workload, every=every)
    given = given_row(workload, rows)
    assert given is not None, "rows_of has one"
    outcomes = predict_rows(workload, rows, watch=watch)
    dense = min((DENSE, EXACT), key=lambda name: outcomes[name].makespan_ms)
    return Comparison(
        workload=workload,
        outcomes=outcomes,
        given=given,
        dense=dense,
        slowness=_slowness(workload, outcomes[given], outcomes[dense], watch),
        meanings={name: row.meaning for name, row in rows.items()},
    )


def _slowness(workload: Workload, given: Outcome, dense: Outcome, watch: Watch) -> float | None:
    """The break-even; None where nothing is sparse."""
    dense_L = workload.plan_settings.dense_L(workload.job.layers)
    if dense_L.all() or given.dense_tokens_share == 1.0:
        return None
    return break_even_slowness(workload, given, dense, watch)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A workload of flags that vary, as given and with dense attention in mode exact.

    Attributes:
        varied: the words that vary, one text for each flag.
        at_most_bytes: memory of the fullest stage, with every micro-batch at the token cap.
        fits: whether the device has as much; true where nobody knows how much it has.
        given, exact: None where they were not planned.
    """

    varied: tuple[str, ...]
    workload: Workload
    at_most_bytes: float
    fits: bool
    given: Outcome | None = None
    exact: Outcome | None = None

    @classmethod
    def of(cls, varied: tuple[str, ...], workload: Workload) -> Layout:
        """One that is not planned yet."""
        most = max(stage.total_bytes for stage in memory_at_most(workload))
        limit = memory_gib(workload.cost.device)
        fits = limit is None or most <= limit * GIBIBYTE
        return cls(varied=varied, workload=workload, at_most_bytes=most, fits=fits)


@dataclass(frozen=True, kw_only=True)
class Layouts:
    """Layouts, the fastest first, those that were not planned last.

    Attributes:
        dense: the one in which dense attention, placed by the plan, is fastest.
        slowness: of the first over that; see :func:`.break_even_slowness`.
        refused: of those that cannot be planned, what varied, and why.
    """

    found: tuple[Layout, ...]
    dense: Layout
    slowness: float | None
    refused: Mapping[tuple[str, ...], str]

    @property
    def dense_ms(self) -> float:
        """Time of the fastest dense step."""
        assert self.dense.exact is not None
        return self.dense.exact.makespan_ms


def planned(layouts: Sequence[Layout]) -> list[Layout]:
    """Those worth planning: that fit, or all where none does."""
    return [each for each in layouts if each.fits] or list(layouts)


def layouts_steps(layouts: Sequence[Layout]) -> int:
    """Steps that :func:`compare_layouts` plans, at most."""
    return 2 * sum(len(each.workload.batches) for each in planned(layouts)) + BREAK_EVEN_STEPS


def compare_layouts(layouts: Sequence[Layout], watch: Watch) -> Layouts:
    """Plan the layouts that fit, or all where none does.

    Raises:
        PlanError: none of them can be planned.
    """
    wanted = planned(layouts)
    found, refused = [], {}
    for layout in wanted:
        try:
            given = predict(layout.workload, watch=watch)
            exact = predict(ROWS[EXACT].of(layout.workload), watch=watch)
        except PlanError as error:
            refused[layout.varied] = str(error)
            continue
        found.append(replace(layout, given=given, exact=exact))
    if not found:
        raise PlanError(f"no row can be planned: {next(iter(refused.values()))}")
    found.sort(key=lambda each: _ms(each.given))
    best, dense = found[0], min(found, key=lambda each: _ms(each.exact))
    assert best.given is not None and dense.exact is not None
    left = [each for each in layouts if all(each is not one for one in wanted)]
    return Layouts(
        found=(*found, *sorted(left, key=lambda each: each.at_most_bytes)),
        dense=dense,
        slowness=_slowness(best.workload, best.given, dense.exact, watch),
        refused=refused,
    )


def _ms(outcome: Outcome | None) -> float:
    return float("inf") if outcome is None else outcome.makespan_ms
