# SPDX-License-Identifier: Apache-2.0
"""Checks, plans and prints a dry run. Loads Megatron.

Shape legend: R data-parallel ranks, M micro-batches, L layers, S samples of a micro-batch.
"""

from __future__ import annotations

import io
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.cost.memory import memory_lines
from sparsebalance_megatron.cost.model import COUNTED
from sparsebalance_megatron.data.blend import read_blends
from sparsebalance_megatron.errors import place_and_reason
from sparsebalance_megatron.json_file import UnreadableFileError, read_json
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.log_directory import LogDirectory
from sparsebalance_megatron.megatron.arguments import arguments_without_ranks, config_from_args
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.kernel_check import check_kernels
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.unsupported import check_resumed_optimizer, check_supported
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.predict.even_stages import even_stages
from sparsebalance_megatron.predict.outcome import predict
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.run.inputs import Inputs, read_inputs
from sparsebalance_megatron.text_table import shown_ms, text_table
from sparsebalance_megatron.view.predictions import header_line, remarks

_PREDICTED_STEPS = 20
"""As many as other predictions plan by default."""
_WEIGHTS_SOURCE = (
    "weights, gradients and optimizer with the formula of Megatron's theoretical_memory_usage"
)
_MOST_MICRO_BATCHES = 32
"""With more, the table has a row per rank, not per micro-batch."""
_MOST_RANKS = 16
"""Rows of that table: as many of the slowest and of the fastest ranks."""


def plan_and_print(device_type: str, argv: Sequence[str]) -> None:
    """Check flags and inputs, plan the first steps and the largest validation batch, print."""
    changed_defaults: list[str] = []
    with _without_argument_dump():
        args, unchecked = _validated_args(device_type, argv, changed_defaults.append)
    for line in changed_defaults:
        print(line)
    config = config_from_args(args)
    check_supported(args, config)
    check_resumed_optimizer(args)
    if config.log_dir is not None and (remark := LogDirectory(config.log_dir).check()):
        unchecked.append(remark)
    with _one_line_refusals():
        settings = RunSettings.from_args(args)
    inputs = read_inputs(settings, config, device_type)
    if device_type == "cpu":
        what = config, settings.host_job.shape, settings.dtype, torch.device("cpu")
        check_kernels(*what)
    else:
        unchecked.append("attention kernels")
    scheduler = inputs.scheduler()
    first = scheduler.planned(0)
    workload = inputs.workload(_PREDICTED_STEPS)
    print("\n".join(describe(args, inputs, first, workload, unchecked)), flush=True)
    if (stages := even_stages(workload)) is not None:
        print(stages, flush=True)
    if inputs.valid is not None:
        largest = inputs.largest_evaluation_step(inputs.valid, scheduler.coverage).plan
        tokens_RM = largest.rank_tokens_RM()
        print(
            f"largest validation batch: {tokens_RM.sum():,.0f} tokens, at most "
            f"{tokens_RM.max():,.0f} of a micro-batch on one rank",
            flush=True,
        )


def describe(
    args: Namespace,
    inputs: Inputs,
    planned: PlannedStep,
    workload: Workload,
    unchecked: Sequence[str],
) -> list[str]:
    """Lines of text: what was checked, what was not, and the plan micro-batch by micro-batch.

    ``workload`` has the first steps with coverage known; ``unchecked`` has a line for each thing
    that a dry run cannot know.
    """
    job, expected = inputs.job, planned.plan.expectation
    settings = inputs.settings
    context = (
        f"context {settings.context_parallel_size} x " if settings.context_parallel_size > 1 else ""
    )
    layers = [sum(len(chunk) for chunk in stage) for stage in job.stage_layers]
    batching, asked = planned.plan.batching, inputs.config.batching
    chosen = "" if batching == asked else f" (the fastest of the placements that {asked} tries)"
    predicted = "predicted"
    if inputs.cost.source.startswith(COUNTED):
        predicted = "estimated from counted operations, not measured on any device"
    coverage = "unknown before the first step, which therefore runs at base budgets"
    if expected.coverage_mean is not None:
        coverage = f"mean {expected.coverage_mean:.3f}, least {expected.coverage_min:.3f}"
    later, least_ms = predict(workload), expected.lower_bound_ms
    recompute = (
        "full"
        if settings.host_job.recompute_all
        else "attention"
        if settings.host_job.recompute_attention
        else "none"
    )
    return [
        f"sparse balance: dry run of {args.world_size} ranks: tensor "
        f"{args.tensor_model_parallel_size} x pipeline {job.pipeline_stages} x {context}data "
        f"{settings.data_parallel_size}; nothing is trained, nothing written",
        "checked:",
        f"  flags: by megatron-core {megatron_version()} and for --sparse-balance",
        *(f"  data: {line}" for line in _data(inputs)),
        f"  costs: {inputs.cost.source}",
        *_positions(args),
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
        *memory_lines(later.stages, later.stages_at_most, _WEIGHTS_SOURCE),
        "",
        f"batching: {batching}{chosen}, planned in {planned.plan_ms:.1f} ms",
        f"makespan: {shown_ms(expected.makespan_ms)} ms {predicted}, at least "
        f"{shown_ms(least_ms)} ms for any plan of this step (ratio "
        f"{expected.makespan_ms / max(least_ms, 1e-9):.3f})",
        f"imbalance, max/mean: micro-batches {expected.imbalance_micro_batches:.3f}, rank sums "
        f"{expected.imbalance_rank_sums:.3f}, makespans {expected.imbalance_makespans:.3f}",
        f"computing, relative to fixed budgets: {expected.work_ratio:.1%}",
        f"coverage: {coverage}",
        f"all steps: {shown_ms(later.makespan_ms)} ms, mean of the first global batches with "
        "coverage known as (k/n)^0.35; `sparse-balance plan` and `advise` predict the same",
        header_line(workload, recompute=recompute, order=f"of training with seed {settings.seed}"),
        *remarks(workload),
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


def _micro_batches(planned: PlannedStep) -> list[str]:
    """List every micro-batch, or of many the ranks: the slowest and the fastest."""
    if len(planned.plan.micro_batches) <= _MOST_MICRO_BATCHES:
        return text_table(_rows(planned))
    rows = _rank_rows(planned)
    left_out = len(rows) - _MOST_RANKS
    if left_out <= 0:
        return text_table(rows)
    half = _MOST_RANKS // 2
    return [
        *text_table([*rows[:half], *rows[-half:]]),
        f"(slowest ranks first; {left_out} ranks between the {half} slowest and the {half} fastest "
        "are left out)",
    ]


def _rows(planned: PlannedStep) -> list[dict[str, str]]:
    """One per micro-batch; its time is forward and backward summed over all stages."""
    ms_RM = planned.times_2RPVM.sum(axis=(0, 2, 3))
    rows = []
    for each in planned.plan.micro_batches:
        last = f"-{each.rank + each.cp_size - 1}" if each.cp_size > 1 else ""
        cells = _cells([each], each.tokens, ms_RM[each.rank, each.position], planned.in_segments)
        rows.append({"rank": f"{each.rank}{last}", "micro-batch": str(each.position), **cells})
    return rows


def _rank_rows(planned: PlannedStep) -> list[dict[str, str]]:
    """One per rank, slowest first: what its micro-batches hold, of a shared one its share."""
    plan = planned.plan
    rank_ms_R = planned.times_2RPVM.sum(axis=(0, 2, 3, 4))
    tokens_R = plan.rank_tokens_RM().sum(axis=1)
    rows = []
    for rank in np.argsort(-rank_ms_R, kind="stable").tolist():
        own = plan.for_rank(rank).micro_batches
        cells = _cells(own, round(tokens_R[rank]), rank_ms_R[rank], planned.in_segments)
        rows.append({"rank": str(rank), "micro-batches": str(len(own)), **cells})
    return rows


def _cells(
    micro_batches: Sequence[MicroBatchPlan], tokens: int, ms: float, in_segments: bool
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


def _data(inputs: Inputs) -> tuple[str, ...]:
    lines = inputs.train.describe()
    blend = read_blends(inputs.settings)["train"]
    if len(lines) == 1 and blend is not None:
        lines = (f"{blend.prefixes[0]}: {lines[0]}",)
    return (*lines, *inputs.untrained())


@contextmanager
def _without_argument_dump() -> Iterator[None]:
    """Print only warnings of Megatron's output, or all of it if Megatron ends the process."""
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            yield
    except SystemExit:
        print(output.getvalue(), end="")
        raise
    for line in output.getvalue().splitlines():
        if line.startswith("WARNING"):
            print(line)


@contextmanager
def _one_line_refusals() -> Iterator[None]:
    """Turn what Megatron, or a tokenizer, raises at wrong flags into one :class:`ConfigError`."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("sparsebalance_megatron"):
            raise
        place, reason = place_and_reason(error)
        raise ConfigError(f"Megatron refuses the flags ({place}): {reason}") from error


def _validated_args(
    device_type: str, argv: Sequence[str], report: Callable[[str], None]
) -> tuple[Namespace, list[str]]:
    """Megatron's arguments as training gets them, and what had to be left unchecked."""
    with _one_line_refusals():
        args = arguments_without_ranks(argv, on_cpu=device_type == "cpu", report=report)
    unchecked = [
        "whether memory suffices: it is counted below, not tried",
        "processes, the network and its libraries (NCCL)",
    ]
    if args.load or args.pretrained_checkpoint:
        unchecked.append("checkpoints; the plan is that of a run from the start")
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        # Megatron's model config refuses fused RoPE where the library that has it is missing.
        args.apply_rope_fusion = False
        unchecked.append("flags that need Transformer Engine, which is not installed here")
    if args.fp8 or args.fp4:
        unchecked.append("fp8 and fp4: times and memory are counted for bfloat16")
    if args.num_experts and args.expert_tensor_parallel_size != args.tensor_model_parallel_size:
        unchecked.append(
            "--expert-tensor-parallel-size: experts are counted with the tensor-parallel size"
        )
    return args, unchecked
