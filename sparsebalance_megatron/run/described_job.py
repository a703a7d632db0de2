# SPDX-License-Identifier: Apache-2.0
"""The job that flags of training describe, checked as training checks them, and its dry run.

One process stands for all ranks: no process group, no device, nothing written. Import this once
the CPU adapter has been installed where that is needed: it loads Megatron.
"""

import io
import logging
import os
import sys
import warnings
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.cost.fit import without_warnings
from sparsebalance_megatron.cost.memory import memory_lines
from sparsebalance_megatron.data.samples import read_blends
from sparsebalance_megatron.errors import one_line_refusals
from sparsebalance_megatron.json_file import UnreadableFileError, read_json
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.log.files import LogDirectory
from sparsebalance_megatron.megatron.arguments import arguments_without_ranks
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.datasets import quiet_imports
from sparsebalance_megatron.megatron.kernel_check import check_kernels
from sparsebalance_megatron.megatron.settings import RunSettings
from sparsebalance_megatron.megatron.training_arguments import checked_settings
from sparsebalance_megatron.plan.budgets.by_layer import with_layer_budgets
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.predict.workload import (
    STEPS,
    Workload,
    WorkloadError,
    batches_of,
    samples_of,
)
from sparsebalance_megatron.run.inputs import (
    Inputs,
    first_batches,
    read_costs,
    read_inputs,
    samples_of_split,
    workload_of,
)
from sparsebalance_megatron.text_table import shown_ms, terminal_columns, text_table, wrapped
from sparsebalance_megatron.view.predictions import predicted

_SHARDED_PARAMETERS = frozenset({"--use-torch-fsdp2", "--use-megatron-fsdp"})


@dataclass(frozen=True, kw_only=True)
class DescribedJob:
    """What flags describe.

    ``args``: Megatron's, as training gets them. ``notes``: lines about defaults that are other than
    Megatron's, and its own warnings. ``unchecked``: of what only training finds out.
    """

    args: Namespace
    config: SparseBalanceConfig
    settings: RunSettings
    device_type: str
    notes: tuple[str, ...]
    unchecked: tuple[str, ...]

    def workload(self, lengths_tokens: np.ndarray | None, place: str, steps: int) -> Workload:
        """The first steps: of documents of these lengths, which come from ``place``, in their
        order, or of the data sets that the flags name, of which only ``.idx`` files are read.

        Raises:
            ConfigError, DataError, WorkloadError: no step can be made, or planned.
        """
        settings, size = self.settings, self.settings.batch_sizes.size_of(0)
        if lengths_tokens is None:
            blend = read_blends(settings)["train"]
            index = samples_of_split(settings, self.config, blend, "train", lengths_only=True)
            if index is None:
                raise WorkloadError("the flags leave no document to train on; see --split")
            batches = first_batches(index, size, steps)
            lengths_tokens = index.lengths_of(np.arange(index.counts.samples))
        else:
            lengths_tokens = samples_of(lengths_tokens, settings.seq_length, self.config.overlong)
            batches = batches_of(lengths_tokens, size, steps, place)
        with without_warnings():
            cost = read_costs(settings, self.config, self.device_type)
        job = settings.host_job
        config = with_dense_length(self.config, cost, job.padded(job.max_sample_tokens))
        config, _ = with_layer_budgets(config, job.layout, lengths_tokens, cost)
        return workload_of(settings, config, cost, batches)


def described_job(flags: Sequence[str], ranks: int, *, on_cpu: bool) -> DescribedJob:
    """Check flags of training for so many ranks, whether they exist or not; 0 for those that were
    launched.

    Raises:
        ConfigError: training refuses the flags.
    """
    notes: list[str] = []
    output = io.StringIO()
    with _world(flags, ranks), quiet_imports():
        try:
            with redirect_stdout(output), _kept_warnings(notes), one_line_refusals():
                args = arguments_without_ranks(flags, on_cpu=on_cpu, report=notes.append)
        except SystemExit:
            print(output.getvalue(), end="")
            raise
        notes += [line for line in output.getvalue().splitlines() if line.startswith("WARNING")]
        unchecked = _unchecked(args)
        lines, config, settings = checked_settings(args)
        notes += lines
    return DescribedJob(
        args=args,
        config=config,
        settings=settings,
        device_type="cpu" if on_cpu else "cuda",
        notes=tuple(notes),
        unchecked=tuple(unchecked),
    )


@contextmanager
def _kept_warnings(notes: list[str]) -> Iterator[None]:
    """Take what Megatron warns of into the notes, once each, and leave out what it logs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.simplefilter("ignore", DeprecationWarning)
        logging.disable(logging.INFO)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)
    notes += dict.fromkeys(f"Megatron: {each.message}" for each in caught)


@contextmanager
def _world(flags: Sequence[str], ranks: int) -> Iterator[None]:
    """Be rank 0 of so many, or of those launched, with these words on the command line.

    Megatron reads all of it from the process. It demands 1 connection to a device of some layouts,
    and more with sharded parameters, for the order of kernels; none runs here.
    """
    ranks = ranks or int(os.environ.get("WORLD_SIZE", "1"))
    connections = "8" if _SHARDED_PARAMETERS & set(flags) else "1"
    environment, words = dict(os.environ), sys.argv
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    os.environ.update({"WORLD_SIZE": str(ranks), "RANK": "0", "LOCAL_RANK": "0"})
    sys.argv = [sys.argv[0], *flags]
    try:
        yield
    finally:
        sys.argv = words
        os.environ.clear()
        os.environ.update(environment)


def _unchecked(args: Namespace) -> list[str]:
    """What no process can know that stands for all ranks."""
    unchecked = [
        "whether memory suffices: it is counted, not tried",
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
    return unchecked


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
    """List every micro-batch, or of many the ranks: the slowest and the fastest."""
    few = len(planned.plan.micro_batches) <= _MOST_MICRO_BATCHES
    rows = _rows(planned) if few else _rank_rows(planned)
    if is_dense:
        rows = [{name: row[name] for name in row if name not in _OF_BUDGETS} for row in rows]
    if few:
        return text_table(rows)
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
