# SPDX-License-Identifier: Apache-2.0
"""What a dry run prints.

Shape legend: R data-parallel ranks, M micro-batches, L layers, S samples of a micro-batch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.cost.memory import MemoryModel, memory_lines, stage_memory
from sparsebalance_megatron.cost.model import COUNTED
from sparsebalance_megatron.cost.work_model import work_model_named
from sparsebalance_megatron.data.blend import read_blends
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.megatron.compat import (
    megatron_version,
    weights_and_optimizer_bytes,
)
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.run.inputs import CostedInputs, Inputs

_HEADER = ("rank", "micro-batch", "samples", "tokens", "budget min", "mean", "max", "predicted ms")
_RANK_HEADER = ("ranks", "micro-batches", *_HEADER[2:])
_WEIGHTS_SOURCE = (
    "weights, gradients and optimizer as Megatron's theoretical_memory_usage counts them"
)
_MOST_SLOTS = 32
"""Above it the table has a row per rank, not per micro-batch."""
_MOST_RANKS = 16
"""Rows of that table: as many of the slowest and of the fastest ranks."""


def describe(
    args: Namespace, inputs: CostedInputs, planned: PlannedStep, unchecked: Sequence[str]
) -> list[str]:
    """Lines of text: what was checked, what was not, and the plan micro-batch by micro-batch.

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
        *_micro_batches(planned),
        "(rank: data-parallel and context-parallel; budgets: blocks, over layers and samples; ms: "
        "forward and backward, all stages)",
        "",
        *_memory(args, inputs, planned.plan),
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


def _micro_batches(planned: PlannedStep) -> list[str]:
    """Every micro-batch, or of many the ranks: alike ones once, those in the middle counted."""
    if len(planned.plan.micro_batches) <= _MOST_SLOTS:
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
        micro_batches = plan.for_rank(int(rank)).micro_batches
        budgets = np.concatenate([micro_batch.budgets_LS.ravel() for micro_batch in micro_batches])
        rows.append(
            (
                str(rank),
                str(len(micro_batches)),
                str(sum(len(micro_batch.samples) for micro_batch in micro_batches)),
                f"{round(plan.rank_tokens_RM()[rank].sum()):,}",
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
    """One per micro-batch; its time is forward and backward summed over all stages."""
    expected = planned.plan.expectation
    micro_batch_ms_RM = (expected.times_2RPVM[0] + expected.times_2RPVM[1]).sum(axis=(1, 2))
    return [
        (
            str(micro_batch.rank)
            if micro_batch.cp_size == 1
            else f"{micro_batch.rank}-{micro_batch.rank + micro_batch.cp_size - 1}",
            str(micro_batch.position),
            str(len(micro_batch.samples)),
            f"{micro_batch.tokens:,}",
            str(micro_batch.budgets_LS.min()),
            f"{np.mean(micro_batch.budgets_LS):.1f}",
            str(micro_batch.budgets_LS.max()),
            f"{micro_batch_ms_RM[micro_batch.rank, micro_batch.position]:.4g}",
        )
        for micro_batch in planned.plan.micro_batches
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Right-aligned columns."""
    cp_sizes = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    return [
        "  ".join(cell.rjust(cp_size) for cell, cp_size in zip(row, cp_sizes, strict=True))
        for row in (header, *rows)
    ]


def _ratio(value: float, bound: float) -> str:
    return f"ratio {value / bound:.3f}" if bound else "no work"


def _coverage(mean: float | None, least: float | None) -> str:
    if mean is None or least is None:
        return "unknown before the first step, which therefore runs at base budgets"
    return f"mean {mean:.3f}, least {least:.3f}"


def _memory(args: Namespace, inputs: Inputs, plan: StepPlan) -> list[str]:
    """Lines of text: GiB per pipeline stage while the planned step runs."""
    shape, job = inputs.settings.shape, inputs.job
    most_blocks = max(int(micro_batch.budgets_LS.max()) for micro_batch in plan.micro_batches)
    model = MemoryModel(
        shape=shape,
        layers_per_stage=tuple(sum(map(len, stage)) for stage in job.stage_layers),
        virtual_stages=job.virtual_stages,
        micro_batch_group_size=job.micro_batch_group_size,
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        sequence_parallel=inputs.settings.sequence_parallel,
        optimizer_ranks=args.data_parallel_size if args.use_distributed_optimizer else 1,
        selected_blocks_per_token=work_model_named(inputs.config.selection).list_entries_per_token(
            heads=shape.num_attention_heads,
            groups=shape.num_query_groups,
            block_size=inputs.config.block_size,
            budget_blocks=most_blocks,
        ),
        recompute_all=inputs.settings.recompute_all,
        recompute_attention=inputs.settings.recompute_attention,
        attention_kept=inputs.config.recompute_attention == "keep",
    )
    weights = _weights_bytes(args, inputs)
    stages = [
        replace(memory, weights_bytes=of_stage)
        for memory, of_stage in zip(
            stage_memory(model, plan.rank_tokens_RM()), weights, strict=True
        )
    ]
    return memory_lines(stages, _WEIGHTS_SOURCE)


def _weights_bytes(args: Namespace, inputs: Inputs) -> list[float]:
    """Weights, gradients and optimizer state of every stage's fullest rank, as Megatron counts.

    Megatron counts a whole model cut evenly; asked for a model of one stage's layers, and of as
    many embeddings as the stage holds, it counts the stage.
    """
    stages = inputs.job.stage_layers
    found = []
    for stage, chunks in enumerate(stages):
        layers = sorted(layer for chunk in chunks for layer in chunk)
        first, last = stage == 0, stage == len(stages) - 1
        tied = not args.untie_embeddings_and_output_weights
        embeddings = int(first) + int(last and not (first and tied))
        one_stage = Namespace(
            **vars(args)
            | {
                "num_layers": len(layers),
                "pipeline_model_parallel_size": 1,
                "padded_vocab_size": args.padded_vocab_size * embeddings,
                "untie_embeddings_and_output_weights": False,
                "moe_layer_freq": _frequency(args, layers),
            }
        )
        found.append(weights_and_optimizer_bytes(one_stage))
    return found


def _frequency(args: Namespace, layers: list[int]) -> int | list[int]:
    """``--moe-layer-freq`` of some of the layers, numbered from 0 in the whole model."""
    frequency = getattr(args, "moe_layer_freq", 1)
    if isinstance(frequency, int):
        return [int(layer % frequency == 0) for layer in layers]
    return [frequency[layer] for layer in layers]
