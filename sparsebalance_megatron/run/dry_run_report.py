# SPDX-License-Identifier: Apache-2.0
"""What a dry run prints.

Shape legend: R data-parallel ranks, M micro-batches, L layers, S samples of a micro-batch.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.cost.memory import memory_lines
from sparsebalance_megatron.cost.model import COUNTED
from sparsebalance_megatron.data.blend import read_blends
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.prediction import planned_memory
from sparsebalance_megatron.megatron.compat import (
    megatron_version,
    weights_and_optimizer_bytes,
)
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan
from sparsebalance_megatron.run.inputs import CostedInputs, Inputs
from sparsebalance_megatron.text_table import shown_ms, text_table

_WEIGHTS_SOURCE = (
    "weights, gradients and optimizer as Megatron's theoretical_memory_usage counts them"
)
_MOST_MICRO_BATCHES = 32
"""With more, the table has a row per rank, not per micro-batch."""
_MOST_RANKS = 16
"""Rows of that table: as many of the slowest and of the fastest ranks."""


def describe(
    args: Namespace,
    inputs: CostedInputs,
    planned: PlannedStep,
    later: Sequence[StepPlan],
    unchecked: Sequence[str],
) -> list[str]:
    """Lines of text: what was checked, what was not, and the plan micro-batch by micro-batch.

    ``later`` are plans with coverage known, as :meth:`.CostedInputs.workload` predicts them;
    ``unchecked`` has a line for each thing that a dry run cannot know.
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
        *_memory(args, inputs, later),
        "",
        f"batching: {planned.plan.batching}{_why(inputs, planned.plan)}, planned in "
        f"{planned.plan_ms:.1f} ms",
        f"makespan: {shown_ms(expected.makespan_ms)} ms {_predicted(inputs)}, at least "
        f"{shown_ms(expected.lower_bound_ms)}"
        f" ms for any plan of this step ({_ratio(expected.makespan_ms, expected.lower_bound_ms)})",
        f"imbalance, max/mean: micro-batches {expected.imbalance_micro_batches:.3f}, rank sums "
        f"{expected.imbalance_rank_sums:.3f}, makespans {expected.imbalance_makespans:.3f}",
        f"computing, relative to fixed budgets: {expected.work_ratio:.1%}",
        f"coverage: {_coverage(expected.coverage_mean, expected.coverage_min)}",
        f"later steps: {shown_ms(_mean_ms(later))} ms, mean of the first {len(later)} global "
        "batches planned with coverage (k/n)^0.35, as `sparse-balance advise` predicts",
    ]


def _predicted(inputs: CostedInputs) -> str:
    """Counted operations are no measurement of any device."""
    if inputs.cost.source.startswith(COUNTED):
        return "estimated from counted operations, not measured on any device"
    return "predicted"


def _micro_batches(planned: PlannedStep) -> list[str]:
    """Every micro-batch, or of many the ranks: alike ones once, those in the middle counted."""
    if len(planned.plan.micro_batches) <= _MOST_MICRO_BATCHES:
        return text_table(_rows(planned))
    rows = _folded(_rank_rows(planned))
    left_out = len(rows) - _MOST_RANKS
    if left_out <= 0:
        return text_table(rows)
    half = _MOST_RANKS // 2
    return [
        *text_table([*rows[:half], *rows[-half:]]),
        f"(slowest ranks first; {left_out} rows between the {half} slowest and the {half} fastest "
        "are left out)",
    ]


def _rows(planned: PlannedStep) -> list[dict[str, str]]:
    """One per micro-batch; its time is forward and backward summed over all stages."""
    ms_RM = planned.times_2RPVM.sum(axis=(0, 2, 3))
    return [
        {
            "rank": str(each.rank)
            if each.cp_size == 1
            else f"{each.rank}-{each.rank + each.cp_size - 1}",
            "micro-batch": str(each.position),
            **_cells(
                [each],
                each.tokens,
                float(ms_RM[each.rank, each.position]),
                in_segments=planned.in_segments,
            ),
        }
        for each in planned.plan.micro_batches
    ]


def _rank_rows(planned: PlannedStep) -> list[dict[str, str]]:
    """One per rank, slowest first: what its micro-batches hold, of a shared one its share."""
    plan = planned.plan
    rank_ms_R = planned.times_2RPVM.sum(axis=(0, 2, 3, 4))
    tokens_R = plan.rank_tokens_RM().sum(axis=1)
    rows = []
    for rank in map(int, np.argsort(-rank_ms_R, kind="stable")):
        micro_batches = plan.for_rank(rank).micro_batches
        cells = _cells(
            micro_batches,
            round(tokens_R[rank]),
            float(rank_ms_R[rank]),
            in_segments=planned.in_segments,
        )
        rows.append({"ranks": str(rank), "micro-batches": str(len(micro_batches)), **cells})
    return rows


def _cells(
    micro_batches: Sequence[MicroBatchPlan], tokens: int, ms: float, *, in_segments: bool
) -> dict[str, str]:
    budgets = np.concatenate([each.budgets_LS.ravel() for each in micro_batches])
    segments = sum(each.segments for each in micro_batches)
    return {
        "samples": str(sum(len(each.samples) for each in micro_batches)),
        "tokens": f"{tokens:,}",
        **({"segments": str(segments)} if in_segments else {}),
        "budget min": str(budgets.min()),
        "mean": f"{budgets.mean():.1f}",
        "max": str(budgets.max()),
        "predicted ms": shown_ms(ms),
    }


def _folded(rows: Sequence[dict[str, str]]) -> list[dict[str, str]]:
    """Ranks with equal rows in one row, which names their number and the first."""
    alike: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        alike.setdefault(tuple(row.values())[1:], []).append(row)
    return [
        each[0] if len(each) == 1 else each[0] | {"ranks": f"{len(each)} as {each[0]['ranks']}"}
        for each in alike.values()
    ]


def _data(inputs: CostedInputs) -> tuple[str, ...]:
    lines = inputs.train.describe()
    if len(lines) > 1:
        return lines
    blend = read_blends(inputs.settings)["train"]
    return lines if blend is None else (f"{blend.prefixes[0]}: {lines[0]}",)


def _why(inputs: CostedInputs, plan: StepPlan) -> str:
    """Why a simpler placement than the configured one is planned."""
    asked = inputs.config.batching
    return "" if plan.batching == asked else f" (of those that {asked} compares, the fastest here)"


def _mean_ms(plans: Sequence[StepPlan]) -> float:
    return float(np.mean([plan.expectation.makespan_ms for plan in plans]))


def _ratio(value: float, bound: float) -> str:
    return f"ratio {value / bound:.3f}" if bound else "no work"


def _coverage(mean: float | None, least: float | None) -> str:
    if mean is None or least is None:
        return "unknown before the first step, which therefore runs at base budgets"
    return f"mean {mean:.3f}, least {least:.3f}"


def _memory(args: Namespace, inputs: Inputs, plans: Sequence[StepPlan]) -> list[str]:
    """GiB per pipeline stage in the planned step that needs most."""
    settings = inputs.settings
    counted = planned_memory(
        plans,
        inputs.job,
        settings.shape,
        selection=inputs.config.selection,
        block_size=inputs.config.block_size,
        dense_L=inputs.policy.dense_L(inputs.job.layers),
        tied_embeddings=not args.untie_embeddings_and_output_weights,
        sequence_parallel=settings.sequence_parallel,
        optimizer_ranks=args.data_parallel_size if args.use_distributed_optimizer else 1,
        recompute_all=settings.recompute_all,
        recompute_attention=settings.recompute_attention,
        attention_kept=inputs.config.recompute_attention == "keep",
    )
    stages = [
        replace(memory, weights_bytes=of_stage)
        for memory, of_stage in zip(counted, _weights_bytes(args, inputs), strict=True)
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
