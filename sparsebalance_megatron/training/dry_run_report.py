# SPDX-License-Identifier: Apache-2.0
"""What a dry run prints.

Shape legend: R data-parallel ranks, M micro-batches, L layers, S samples of a micro-batch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.cost.model import COUNTED
from sparsebalance_megatron.data.blend import read_blends
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.training.dry_run_memory import describe_memory
from sparsebalance_megatron.training.inputs import CostedInputs

_HEADER = ("rank", "micro-batch", "samples", "tokens", "budget min", "mean", "max", "predicted ms")
_RANK_HEADER = ("ranks", "micro-batches", *_HEADER[2:])
_MOST_SLOTS = 32
"""Above it the table has a row per rank, not per micro-batch."""
_MOST_RANKS = 16
"""Rows of that table: as many of the slowest and of the fastest ranks."""


def describe(
    args: Namespace, inputs: CostedInputs, planned: PlannedStep, unchecked: Sequence[str]
) -> list[str]:
    """Lines of text: what was checked, what was not, and the plan slot by slot.

    Args:
        unchecked: what a dry run cannot know, one line each.
    """
    job, expected = inputs.job, planned.plan.expectation
    settings = inputs.settings
    context = (
        f"context {settings.context_parallel_size} x " if settings.context_parallel_size > 1 else ""
    )
    layers = [sum(len(chunk) for chunk in stage) for stage in job.stage_layers]
    return [
        f"sparse balance: dry run of {args.world_size} ranks: tensor "
        f"{args.tensor_model_parallel_size} x pipeline {job.pipeline_stages} x {context}data "
        f"{settings.data_parallel_size}; nothing is trained, nothing written",
        "checked:",
        f"  flags: by megatron-core {megatron_version()} and for --sparse-balance",
        *(f"  data: {line}" for line in _data(inputs)),
        f"  costs: {inputs.cost.source}",
        "not checked:",
        *(f"  {what}" for what in unchecked),
        "",
        f"first step: {len(planned.samples)} samples in {planned.micro_batches} "
        "micro-batches per "
        f"data-parallel rank; layers per pipeline stage: {' '.join(map(str, layers))}",
        "",
        *_slots(planned),
        "(rank: data-parallel and context-parallel; budgets: blocks, over layers and samples; ms: "
        "forward and backward, all stages)",
        "",
        *describe_memory(args, inputs, planned.plan),
        "",
        f"batching: {planned.plan.batching}, planned in {planned.plan_ms:.1f} ms",
        f"makespan: {expected.makespan_ms:.4g} ms {_predicted(inputs)}, at least "
        f"{expected.lower_bound_ms:.4g}"
        f" ms for any plan of this step ({_ratio(expected.makespan_ms, expected.lower_bound_ms)})",
        f"imbalance, max/mean: micro-batches {expected.imbalance_micro_batches:.3f}, rank sums "
        f"{expected.imbalance_rank_sums:.3f}, makespans {expected.imbalance_makespans:.3f}",
        f"computing, relative to fixed budgets: {expected.work_ratio:.1%}",
        f"coverage: {_coverage(expected.coverage_mean, expected.coverage_min)}",
    ]


def _predicted(inputs: CostedInputs) -> str:
    """How the times were predicted: counted operations are no measurement of any device."""
    if inputs.cost.source.startswith(COUNTED):
        return "estimated from counted operations, not measured on any device"
    return "predicted"


def _slots(planned: PlannedStep) -> list[str]:
    """Every micro-batch, or of many the ranks: alike ones once, those in the middle counted."""
    if len(planned.plan.slots) <= _MOST_SLOTS:
        return _table(_HEADER, _rows(planned))
    rows = _folded(_rank_rows(planned))
    left_out = max(0, len(rows) - _MOST_RANKS)
    if left_out:
        half = _MOST_RANKS // 2
        rows = [*rows[:half], *rows[-half:]]
    lines = _table(_RANK_HEADER, rows)
    if left_out:
        lines.append(
            f"(slowest ranks first; {left_out} rows between the {_MOST_RANKS // 2} slowest and the "
            f"{_MOST_RANKS // 2} fastest are left out)"
        )
    return lines


def _rank_rows(planned: PlannedStep) -> list[tuple[str, ...]]:
    """One per rank, slowest first: what its micro-batches hold together; shared rows count as its
    share of their tokens."""
    plan, expected = planned.plan, planned.plan.expectation
    rank_ms_R = (expected.times_2RPVM[0] + expected.times_2RPVM[1]).sum(axis=(1, 2, 3))
    rows: list[tuple[str, ...]] = []
    for rank in np.argsort(-rank_ms_R, kind="stable"):
        slots = plan.for_rank(int(rank)).micro_batches
        budgets = np.concatenate([slot.budgets_LS.ravel() for slot in slots])
        rows.append(
            (
                str(rank),
                str(len(slots)),
                str(sum(len(slot.samples) for slot in slots)),
                f"{round(sum(slot.tokens / slot.width for slot in slots)):,}",
                str(budgets.min()),
                f"{budgets.mean():.1f}",
                str(budgets.max()),
                f"{rank_ms_R[rank]:.4g}",
            )
        )
    return rows


def _folded(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Ranks whose rows say the same, in one row that names how many they are and the first."""
    ranks: dict[tuple[str, ...], list[str]] = {}
    for rank, *rest in rows:
        ranks.setdefault(tuple(rest), []).append(rank)
    return [
        (each[0] if len(each) == 1 else f"{len(each)} as {each[0]}", *rest)
        for rest, each in ranks.items()
    ]


def _data(inputs: CostedInputs) -> tuple[str, ...]:
    lines = inputs.train.describe()
    if len(lines) > 1:
        return lines
    blend = read_blends(inputs.settings)["train"]
    return lines if blend is None else (f"{blend.prefixes[0]}: {lines[0]}",)


def _rows(planned: PlannedStep) -> list[tuple[str, ...]]:
    """One per slot; its time is forward and backward summed over all stages."""
    expected = planned.plan.expectation
    slot_ms_RM = (expected.times_2RPVM[0] + expected.times_2RPVM[1]).sum(axis=(1, 2))
    return [
        (
            str(slot.rank) if slot.width == 1 else f"{slot.rank}-{slot.rank + slot.width - 1}",
            str(slot.position),
            str(len(slot.samples)),
            f"{slot.tokens:,}",
            str(slot.budgets_LS.min()),
            f"{np.mean(slot.budgets_LS):.1f}",
            str(slot.budgets_LS.max()),
            f"{slot_ms_RM[slot.rank, slot.position]:.4g}",
        )
        for slot in planned.plan.slots
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        for row in (header, *rows)
    ]


def _ratio(value: float, bound: float) -> str:
    return f"ratio {value / bound:.3f}" if bound else "no work"


def _coverage(mean: float | None, least: float | None) -> str:
    if mean is None or least is None:
        return "unknown before the first step, which therefore runs at base budgets"
    return f"mean {mean:.3f}, least {least:.3f}"
