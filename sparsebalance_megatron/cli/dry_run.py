# SPDX-License-Identifier: Apache-2.0
"""Dry run of training: what was checked, the plan of the first step, and what the job will take.

Import this once the CPU adapter has been installed where that is needed: it loads Megatron.
"""

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsebalance_megatron.cost.fit import without_warnings
from sparsebalance_megatron.cost.memory import memory_lines
from sparsebalance_megatron.data.samples import read_blends
from sparsebalance_megatron.json_file import UnreadableFileError, read_json
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.files import LogDirectory
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.kernel_check import check_kernels
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.predict.workload import STEPS
from sparsebalance_megatron.run.described_job import described_job
from sparsebalance_megatron.run.inputs import Inputs, read_inputs
from sparsebalance_megatron.text_table import shown_ms, terminal_columns, text_table, wrapped
from sparsebalance_megatron.view.predictions import predicted

_WEIGHTS_SOURCE = (
    "weights, gradients and optimizer with the formula of Megatron's theoretical_memory_usage"
)
_MOST_MICRO_BATCHES = 32
"""With more, the table has a row per rank, not per micro-batch."""
_OF_BUDGETS = ("budget min", "mean", "max")
_MOST_RANKS = 16
"""Rows of that table: as many of the slowest and of the fastest ranks."""


def plan_and_print(argv: Sequence[str], ranks: int, *, on_cpu: bool) -> None:
    """Check flags and inputs, plan the first steps and the largest validation batch, print; see
    :func:`described_job`."""
    job = described_job(argv, ranks, on_cpu=on_cpu)
    columns, unchecked = terminal_columns(), [*job.unchecked]
    for note in job.notes:
        print(*wrapped(note, columns), sep="\n")
    config, settings = job.config, job.settings
    if config.log_dir is not None and (remark := LogDirectory(config.log_dir).check()):
        unchecked.append(remark)
    with without_warnings():
        inputs = read_inputs(settings, config, job.device_type)
    if on_cpu:
        what = config, settings.host_job.shape, settings.dtype, torch.device("cpu")
        check_kernels(*what)
    else:
        unchecked.append("attention kernels")
    scheduler = inputs.scheduler()
    first = scheduler.planned(0)
    print("\n".join(describe(job.args, inputs, first, unchecked)), flush=True)
    workload = inputs.workload(STEPS)
    comparison, lines = predicted(
        workload, f"of training with seed {settings.seed}", terminal_columns()
    )
    given = comparison.given.outcome
    assert given is not None
    memory = memory_lines(given.stages, given.stages_at_most, _WEIGHTS_SOURCE)
    print("", *memory, "", *lines, sep="\n", flush=True)
    if inputs.valid is not None:
        largest = inputs.largest_evaluation_step(inputs.valid, scheduler).plan
        tokens_RM = largest.rank_tokens_RM()
        print(
            f"largest validation batch: {tokens_RM.sum():,.0f} tokens, at most "
            f"{tokens_RM.max():,.0f} of a micro-batch on one rank",
            flush=True,
        )


def describe(
    args: Namespace, inputs: Inputs, planned: PlannedStep, unchecked: Sequence[str]
) -> list[str]:
    """Lines of text: what was checked, what was not, and the plan micro-batch by micro-batch."""
    job, expected, settings = inputs.job, planned.plan.expectation, inputs.settings
    context = (
        f"context {settings.context_parallel_size} x " if settings.context_parallel_size > 1 else ""
    )
    layers = [sum(len(chunk) for chunk in stage) for stage in job.stage_layers]
    batching, asked = planned.plan.batching, inputs.config.batching
    chosen = "" if batching == asked else f", the fastest of the placements that {asked} tries"
    budgets = [
        f"budgets, relative to fixed ones: {expected.work_ratio:.1%}",
        "coverage: unknown before the first step, which therefore runs at base budgets",
    ]
    if expected.coverage_mean is not None:
        budgets[1] = (
            f"coverage: mean {expected.coverage_mean:.3f}, least {expected.coverage_min:.3f}"
        )
    least_ms = expected.lower_bound_ms
    is_dense = bool(inputs.plan_settings.dense_L(job.layers).all())
    return [
        f"sparse balance: dry run of {args.world_size} ranks: tensor "
        f"{args.tensor_model_parallel_size} x pipeline {job.pipeline_stages} x {context}data "
        f"{settings.data_parallel_size}; nothing is trained, nothing written",
        "checked:",
        f"  flags: by megatron-core {megatron_version()} and for --sparse-balance",
        *(f"  data: {line}" for line in _data(inputs)),
        *(f"  {line}" for line in inputs.layer_lines),
        *_positions(args),
        "not checked:",
        *(f"  {what}" for what in unchecked),
        "",
        f"first step: {len(planned.samples)} samples in {planned.micro_batches} "
        "micro-batches per "
        f"data-parallel rank; layers per pipeline stage: {' '.join(map(str, layers))}",
        "",
        *_micro_batches(planned, is_dense),
        "(rank: data-parallel and context-parallel; "
        f"{'' if is_dense else 'budgets: blocks, over layers and samples; '}ms: forward and "
        f"backward, all stages, of {inputs.cost.device})",
        "",
        f"placement: {batching}{chosen}; planned in {planned.plan_ms:.1f} ms",
        f"step: {shown_ms(expected.makespan_ms)} ms on {inputs.cost.device}, "
        f"{expected.makespan_ms / max(least_ms, 1e-9):.3f} times the least of any plan for its "
        "samples",
        *([] if is_dense else budgets),
    ]


def _positions(args: Namespace) -> tuple[str, ...]:
    """A line where sequences are longer than the model beside the tokenizer was trained for."""
    file = Path(str(args.tokenizer_model), "config.json")
    scaled = args.position_embedding_type != "rope" or args.use_rope_scaling
    if scaled or args.rotary_seq_len_interpolation_factor:
        return ()
    try:
        positions = read_json(file, dict[str, Any]).get("max_position_embeddings")
    except UnreadableFileError:
        return ()
    if not isinstance(positions, int) or args.seq_length <= positions:
        return ()
    return (
        f"  positions: --seq-length {args.seq_length:,} is beyond the {positions:,} of {file}; "
        "scale RoPE (--position-embedding-type yarn, --use-rope-scaling), or give shorter ones",
    )


def _micro_batches(planned: PlannedStep, is_dense: bool = False) -> list[str]:
    """A table of all micro-batches, or of many the ranks: the slowest and the fastest."""
    rows = _rows(planned)
    if is_dense:
        rows = [{name: row[name] for name in row if name not in _OF_BUDGETS} for row in rows]
    left_out, half = len(rows) - _MOST_RANKS, _MOST_RANKS // 2
    if "micro-batch" in rows[0] or left_out <= 0:
        return text_table(rows)
    return [
        *text_table([*rows[:half], *rows[-half:]]),
        f"(slowest ranks first; {left_out} ranks between the {half} slowest and the {half} fastest "
        "are left out)",
    ]


def _rows(planned: PlannedStep) -> list[dict[str, str]]:
    """One per micro-batch, or of many one per rank, slowest first, of a shared one its share; times
    are forward and backward summed over all stages."""
    plan, ms_RM = planned.plan, planned.times_2RPVM.sum(axis=(0, 2, 3))
    rows = []
    if len(plan.micro_batches) <= _MOST_MICRO_BATCHES:
        for each in plan.micro_batches:
            last = f"-{each.rank + each.cp_size - 1}" if each.cp_size > 1 else ""
            cells = _cells([each], each.tokens, ms_RM[each.rank, each.position], planned)
            place = {"rank": f"{each.rank}{last}", "micro-batch": str(each.position)}
            rows.append(place | cells)
        return rows
    rank_ms_R, tokens_R = ms_RM.sum(axis=1), plan.rank_tokens_RM().sum(axis=1)
    for rank in np.argsort(-rank_ms_R, kind="stable").tolist():
        own = plan.for_rank(rank).micro_batches
        cells = _cells(own, round(tokens_R[rank]), rank_ms_R[rank], planned)
        rows.append({"rank": str(rank), "micro-batches": str(len(own)), **cells})
    return rows


def _cells(
    micro_batches: Sequence[MicroBatchPlan], tokens: int, ms: float, planned: PlannedStep
) -> dict[str, str]:
    budgets = np.concatenate([each.budgets_LS.ravel() for each in micro_batches])
    segments = sum(each.segments for each in micro_batches)
    return {
        "samples": str(sum(len(each.samples) for each in micro_batches)),
        "tokens": f"{tokens:,}",
        **({"segments": str(segments)} if planned.in_segments else {}),
        "budget min": str(budgets.min()),
        "mean": f"{budgets.mean():.1f}",
        "max": str(budgets.max()),
        "predicted ms": shown_ms(ms),
    }


def _data(inputs: Inputs) -> tuple[str, ...]:
    lines = inputs.train.describe()
    blend = read_blends(inputs.settings.data_flags)["train"]
    if len(lines) == 1 and blend is not None:
        lines = (f"{blend.prefixes[0]}: {lines[0]}",)
    return (*lines, *inputs.untrained())
