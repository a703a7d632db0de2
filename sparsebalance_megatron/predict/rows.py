# SPDX-License-Identifier: Apache-2.0
"""Ways to plan the same batches: the rows of tables. The paper is arXiv:2604.13847."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.flags import MODES
from sparsebalance_megatron.predict.workload import Workload

_AS_MEGATRON = {"batching": "arrival", "context_parallel": "static", "max_segments": 1}
"""Samples where they arrive, and ranks that share micro-batches as Megatron has them do."""


_CHOSEN = ("batching", "tuning")


class Row(NamedTuple):
    """A way to plan: fields of :class:`.PlanSettings`, of which batching and tuning are the default
    where it does not name them; and what it is, in words."""

    changes: Mapping[str, Any]
    meaning: str

    def of(self, workload: Workload) -> Workload:
        """The workload, planned this way: on the same ranks, which share what they did."""
        changes = {name: getattr(SparseBalanceConfig, name) for name in _CHOSEN}
        changes |= self.changes
        if workload.plan_settings.max_context_parallel == 1:
            changes.pop("context_parallel", None)
        elif "context_parallel" in changes:
            changes["max_context_parallel"] = workload.job.context_parallel_size
        return replace(workload, plan_settings=replace(workload.plan_settings, **changes))


DENSE, EXACT, OURS, GIVEN = "dense", "exact", "ours", "as given"
ROWS: Mapping[str, Row] = {
    DENSE: Row(
        {**MODES["exact"], **_AS_MEGATRON},
        "dense attention in order of arrival, as without the plugin",
    ),
    EXACT: Row(MODES["exact"], "dense attention, placed by the plan (--sparse-balance-mode exact)"),
    "fixed budgets": Row({"tuning": "off"}, "base budgets for all, placed by the plan"),
    "paper": Row(MODES["paper"], "placed by latency, budgets tuned towards their mean"),
    OURS: Row(MODES["default"], "placed by the plan, budgets tuned by it: the default"),
}
"""The first is what all others are compared with."""
_FURTHER_ROWS: Mapping[str, Row] = {
    "fixed budgets, arrival": Row({**_AS_MEGATRON, "tuning": "off"}, "base budgets for all"),
    "DST": Row({**_AS_MEGATRON, "tuning": "anchor"}, "in order of arrival, the paper's budgets"),
    "LBB": Row({"batching": "length", "tuning": "off"}, "placed by length, base budgets"),
    "SAB": Row({"batching": "latency", "tuning": "off"}, "placed by latency, base budgets"),
    "LBB+DST": Row({"batching": "length", "tuning": "anchor"}, "LBB, with the paper's budgets"),
}
_ONE_PIECE = Row({"max_segments": 1}, "ours without segments")
_SAME_SIZE = Row({"context_parallel": "static"}, "ours, as many ranks for every micro-batch")


def rows_of(workload: Workload, *, every: bool = False) -> dict[str, Row]:
    """The rows of a workload, those of dense attention first.

    A workload whose layers are all dense has no others. One that is planned like none of them
    comes last, as it is given.

    Args:
        every: further rows too, which take a part of the default each.
    """
    settings, rows = workload.plan_settings, dict(ROWS)
    if workload.is_dense:
        rows = {name: rows[name] for name in (DENSE, EXACT)}
    elif every:
        rows |= _FURTHER_ROWS
        if settings.max_segments > 1:
            rows["ours, one piece"] = _ONE_PIECE
        if settings.context_parallel == "dynamic" and settings.max_context_parallel > 1:
            rows["ours, static cp"] = _SAME_SIZE
    if given_row(workload, rows) is None:
        own = {name: getattr(settings, name) for name in _CHOSEN}
        rows[GIVEN] = Row(own, "what these flags train")
    return rows


def given_row(workload: Workload, rows: Mapping[str, Row]) -> str | None:
    """The row that is planned as the workload itself; None where there is none."""
    settings = workload.plan_settings
    if workload.is_dense:
        settings = replace(settings, layer_budgets=MODES["exact"]["layer_budgets"])
    planned = {name: row.of(workload).plan_settings for name, row in rows.items()}
    return next((name for name, each in planned.items() if each == settings or name == GIVEN), None)
