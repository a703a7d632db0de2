# SPDX-License-Identifier: Apache-2.0
"""Ways to plan the same batches: the rows of tables. The paper is arXiv:2604.13847."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from sparsebalance_megatron.config import Batching, ContextParallel, Tuning
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.peers import verl_placement
from sparsebalance_megatron.predict.workload import Balancer, Workload


class Variant(NamedTuple):
    """One way to plan.

    ``context_parallel``: None leaves the ranks of the job apart, whatever its context-parallel
    size. ``segments``: whether micro-batches may pass the pipeline in segments. ``dense``: whether
    all layers are. ``placed_by``: another balancer. ``waits_in_layers``: whether the job's lockstep
    groups do.
    """

    batching: Batching
    tuning: Tuning
    context_parallel: ContextParallel | None = None
    segments: bool = False
    dense: bool = False
    placed_by: Balancer | None = None
    waits_in_layers: bool = True

    def of(self, workload: Workload) -> Workload:
        """The workload, planned this way."""
        job = workload.job if self.context_parallel else without_sharing(workload.job)
        dynamic = self.context_parallel == "dynamic"
        plan_settings = replace(
            workload.plan_settings,
            batching=self.batching,
            tuning=self.tuning,
            context_parallel=self.context_parallel or "static",
            max_context_parallel=workload.plan_settings.max_context_parallel if dynamic else 1,
            max_segments=workload.plan_settings.max_segments if self.segments else 1,
        )
        if job is not workload.job:
            cap_tokens = (
                plan_settings.max_tokens_per_micro_batch * workload.job.context_parallel_size
            )
            plan_settings = replace(plan_settings, max_tokens_per_micro_batch=cap_tokens)
        if self.dense:
            plan_settings = replace(plan_settings, layer_budgets="dense:all")
        if not self.waits_in_layers:
            job = replace(job, lockstep_ranks=1)
        return replace(workload, job=job, plan_settings=plan_settings, placed_by=self.placed_by)


def without_sharing(job: Job) -> Job:
    """The job whose ranks share no micro-batch, with at least one on each."""
    micro_batches = max(1, job.micro_batches // job.context_parallel_size)
    return replace(job, context_parallel_size=1, micro_batches=micro_batches)


BASELINE = "baseline"
OURS = "ours"
ROWS: Mapping[str, Variant] = {
    BASELINE: Variant("arrival", "off"),
    "+DST": Variant("arrival", "anchor"),
    "+SAB": Variant("latency", "off"),
    "+LBB": Variant("length", "off"),
    "LBB+DST": Variant("length", "anchor"),
    "SAB+DST": Variant("latency", "anchor"),
    OURS: Variant("makespan", "raise"),
    "ours, fixed budgets": Variant("makespan", "off"),
}
"""The rows of the paper's ablation table, then this package's."""

SHARED_ROWS: Mapping[str, Variant] = {
    "baseline-cp": Variant("arrival", "off", "static"),
    "ours-static-cp": Variant("makespan", "raise", "static"),
    "ours-dynamic-cp": Variant("makespan", "raise", "dynamic"),
}
"""Rows whose micro-batches several ranks share: not planned, planned with the context-parallel size
for all, and with a planned cp_size for each."""

SEGMENTED_ROWS: Mapping[str, Variant] = {
    "ours-segments": Variant("makespan", "raise", segments=True),
    "ours-segments-cp": Variant("makespan", "raise", "dynamic", segments=True),
}
"""Rows whose micro-batches may pass the pipeline in segments; in the second, ranks may share some
of them."""

PEER_ROWS: Mapping[str, Variant] = {
    "verl": Variant("latency", "off", placed_by=verl_placement),
    "ODC": Variant("latency", "off", waits_in_layers=False),
}
"""Rows of other balancers for ranks that wait for one another in every layer."""

DENSE, DENSE_BALANCED = "dense", "dense, balanced"
ROWS_LEGEND: Mapping[str, str] = {
    BASELINE: "samples in order of arrival, fixed budgets",
    "+DST": "budgets tuned towards an anchor latency (the paper)",
    "+SAB": "samples placed by latency (the paper)",
    "+LBB": "samples placed by length",
    "ours": "samples placed by makespan, budgets raised where ranks would idle: the default",
    "ours, fixed budgets": "placement by makespan, fixed budgets",
    "-cp": "ranks share micro-batches: all alike (static), or as planned (dynamic)",
    "ours-segments": "micro-batches pass the pipeline in pieces",
    "verl": "fixed budgets, placed and ordered as verl does (its rule, at these predicted times)",
    "ODC": "fixed budgets, sums balanced, no rank waits in a layer: the limit of its own runtime",
    DENSE: "dense attention in order of arrival, as without the plugin",
    DENSE_BALANCED: "dense attention, placed by makespan",
}
"""Row of the table, or a part of its name -> what it is."""


def best_row(workload: Workload) -> Variant:
    """The way that training plans by default: with all that the workload allows."""
    cp_size, plan_settings = workload.job.context_parallel_size, workload.plan_settings
    if plan_settings.max_segments > 1:
        return list(_segmented_rows(workload).values())[-1]
    if plan_settings.max_context_parallel > 1:
        return SHARED_ROWS["ours-dynamic-cp"]
    return SHARED_ROWS["ours-static-cp"] if cp_size > 1 else ROWS[OURS]


def dense_row(workload: Workload) -> Variant:
    """Dense attention, otherwise planned as :func:`best_row`."""
    return best_row(workload)._replace(tuning="off", segments=False, dense=True)


def rows_of(workload: Workload) -> dict[str, Variant]:
    """All rows that the workload's context-parallel sizes and segments allow."""
    shared = dict(SHARED_ROWS)
    is_shared = workload.job.context_parallel_size > 1
    if not is_shared:
        del shared["baseline-cp"], shared["ours-static-cp"]
    if workload.plan_settings.max_context_parallel == 1:
        del shared["ours-dynamic-cp"]
    in_order = Variant("arrival", "off", context_parallel="static" if is_shared else None)
    dense = {DENSE: in_order._replace(dense=True), DENSE_BALANCED: dense_row(workload)}
    peers = PEER_ROWS if workload.job.lockstep_ranks > 1 else {}
    return {**ROWS, **shared, **_segmented_rows(workload), **peers, **dense}


def _segmented_rows(workload: Workload) -> dict[str, Variant]:
    """Rows of segments, the one that plans most last; none where no segments are allowed."""
    job, plan_settings = workload.job, workload.plan_settings
    rows = dict(SEGMENTED_ROWS) if plan_settings.max_segments > 1 else {}
    if rows and (job.context_parallel_size > 1 or plan_settings.max_context_parallel == 1):
        del rows["ours-segments-cp"]
    return rows
