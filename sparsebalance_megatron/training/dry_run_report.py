# SPDX-License-Identifier: Apache-2.0
"""What a dry run prints.

Shape legend: R data-parallel ranks, M micro-batches, L layers, S samples of a micro-batch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.data.blend import read_blends
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.training.inputs import CostedInputs

_HEADER = ("rank", "micro-batch", "samples", "tokens", "budget min", "mean", "max", "predicted ms")


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
        *_table(_HEADER, _rows(planned)),
        "(rank: data-parallel and context-parallel; budgets: blocks, over layers and samples; ms: "
        "forward and backward, all stages)",
        "",
        f"batching: {planned.plan.batching}, planned in {planned.plan_ms:.1f} ms",
        f"makespan: {expected.makespan_ms:.4g} ms predicted, at least {expected.lower_bound_ms:.4g}"
        f" ms for any plan of this step ({_ratio(expected.makespan_ms, expected.lower_bound_ms)})",
        f"imbalance, max/mean: micro-batches {expected.imbalance_micro_batches:.3f}, rank sums "
        f"{expected.imbalance_rank_sums:.3f}, makespans {expected.imbalance_makespans:.3f}",
        f"work: {expected.work_ratio:.1%} of that at base budgets",
        f"coverage: {_coverage(expected.coverage_mean, expected.coverage_min)}",
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
