# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance advise``: what a job would take under several settings, before any is run."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from sparsebalance_megatron.cli.output import open_console, progress_bar
from sparsebalance_megatron.cli.workload_flags import (
    add_bandwidth_flag,
    add_lengths_flags,
    add_model_flag,
    check_at_least_one,
    lengths_in_order,
)
from sparsebalance_megatron.config import SparseBalanceConfig, check_range
from sparsebalance_megatron.cost.memory import GIBIBYTE, memory_lines
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import CostTable
from sparsebalance_megatron.view.simulate.advice import (
    Advice,
    AdviceInputs,
    Choice,
    advise,
    job_on_gpus,
)
from sparsebalance_megatron.view.simulate.hf_sizes import model_named
from sparsebalance_megatron.view.simulate.lengths import WorkloadError, split_overlong
from sparsebalance_megatron.view.simulate.models import h200_cost, with_bandwidth
from sparsebalance_megatron.view.simulate.presets import ModelPreset
from sparsebalance_megatron.view.simulate.setups import batches_of
from sparsebalance_megatron.view.simulate.tables import best_fitting, findings, show_choices

MEMORY_SOURCE = (
    "weights, gradients and optimizer counted with the formula of Megatron's "
    "theoretical_memory_usage, without Megatron, for --sequence-parallel and "
    "--use-distributed-optimizer; a dry run asks Megatron itself"
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``advise``."""
    parser.description = (
        "Predict step time, bubble and memory of your samples and your model over block sizes, "
        "budgets, micro-batches and context-parallel sizes. Times are estimated from counted "
        "operations of an H200 unless a cost table is given."
    )
    add_lengths_flags(parser)
    parser.add_argument("--seed", type=int, help="of the order of --data-path; default: 1234")
    add_model_flag(parser, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="of the job")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--global-batch", type=int, required=True, help="samples of a step")
    for flag, default, text in (
        ("--block-sizes", [128, 256, 512], "tokens; with --cost-table: that of the table"),
        ("--base-budgets", [16, 32, 64], "blocks"),
        ("--micro-batches", None, "per rank and step; default: one sample in each"),
        ("--context-parallel-sizes", [1], "ranks that share a sample, as --context-parallel-size"),
    ):
        parser.add_argument(flag, type=int, nargs="+", default=default, metavar="N", help=text)
    parser.add_argument(
        "--recompute", choices=("none", "attention", "full"), default="none", help="in backward"
    )
    parser.add_argument("--cost-table", type=Path, help="written by `sparse-balance profile`")
    add_bandwidth_flag(parser)
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of one GPU")
    parser.add_argument("--steps", type=int, default=2, help="global batches to plan")
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(arguments: Namespace) -> int:
    """Plan every choice, predict, print.

    Raises:
        ConfigError, WorkloadError, DataError, CostTableError: a value or a file is wrong.
        OutputError: if rich is not installed.
    """
    inputs = _inputs(arguments)
    found = advise(
        inputs,
        _choices(arguments, inputs),
        partial(progress_bar, command="advise", unit="choice", extra="tools"),
    )
    chosen = best_fitting(found, arguments.gpu_memory)
    sentences = findings(found, arguments.gpu_memory, chosen)
    if arguments.json:
        print(json.dumps(_as_json(found, sentences), indent=2))
        return 0
    console = open_console(", or use --json")
    show_choices(console, found, arguments.gpu_memory)
    lines = [*sentences, *memory_lines(chosen.stages, MEMORY_SOURCE)]
    lines += [f"costs: {found.cost_source}"]
    lines += [f"left out: {reason}" for reason in found.left_out]
    for line in lines:
        console.print(line, markup=False, highlight=False)
    return 0


def _as_json(found: Advice, sentences: list[str]) -> dict[str, object]:
    return {
        "costs": found.cost_source,
        "memory": MEMORY_SOURCE,
        "advice": sentences,
        "left_out": list(found.left_out),
        "choices": [
            asdict(outlook) | {"fullest_gib": outlook.fullest_bytes / GIBIBYTE}
            for outlook in found.outlooks
        ],
    }


def _inputs(arguments: Namespace) -> AdviceInputs:
    check_at_least_one(arguments, "gpus", "tp", "pp", "global_batch", "steps")
    if not 0 < arguments.gpu_memory < float("inf"):
        raise WorkloadError(f"--gpu-memory {arguments.gpu_memory}: must be finite and above 0")
    model = model_named(arguments.model)
    if model.shape.num_attention_heads % arguments.tp:
        raise WorkloadError(
            f"--tp {arguments.tp}: must divide the {model.shape.num_attention_heads} heads of "
            f"{model.name}"
        )
    lengths = _lengths(arguments)
    batches = batches_of(
        lengths[: arguments.steps * arguments.global_batch], arguments.global_batch
    )
    if not batches:
        raise WorkloadError(
            f"{len(lengths)} lengths, and a step needs --global-batch {arguments.global_batch}"
        )
    costs, selection = _costs(arguments, model)
    return AdviceInputs(
        job=job_on_gpus(
            gpus=arguments.gpus,
            tensor_parallel_size=arguments.tp,
            stages=arguments.pp,
            layers=model.layers,
        ),
        shape=replace(model.shape, tensor_parallel_size=arguments.tp),
        tied_embeddings=model.tied_embeddings,
        batches=batches,
        costs=costs,
        selection=selection,
        recompute_all=arguments.recompute == "full",
        recompute_attention=arguments.recompute == "attention",
    )


def _lengths(arguments: Namespace) -> np.ndarray:
    """Tokens of samples in order, longer ones than ``--seq-length`` split."""
    if arguments.seq_length is not None and arguments.seq_length < 1:
        raise WorkloadError(f"--seq-length {arguments.seq_length}: below 1")
    lengths = lengths_in_order(arguments, arguments.steps * arguments.global_batch)
    if arguments.data_path is not None or arguments.seq_length is None:
        return lengths
    return split_overlong(lengths, arguments.seq_length)


def _costs(arguments: Namespace, model: ModelPreset) -> tuple[Callable[[int], CostModel], str]:
    """Block size -> costs, and whose queries select; a table knows one of either."""
    shape = replace(model.shape, tensor_parallel_size=arguments.tp)
    if arguments.cost_table is None:
        selection = SparseBalanceConfig().selection

        def counted(block_size: int) -> CostModel:
            cost = h200_cost(
                model,
                block_size=block_size,
                tensor_parallel_size=arguments.tp,
                selection=selection,
            )
            return with_bandwidth(cost, arguments.gigabytes_per_second)

        return counted, selection
    table = CostTable.load(arguments.cost_table)
    # Megatron pads the vocabulary, and by how much is not known here.
    padded = replace(shape, vocab_size=table.identity.shape.vocab_size)
    table.check_matches(replace(table.identity, shape=padded))
    cost = with_bandwidth(CostModel.fit(table), arguments.gigabytes_per_second)
    # Fitting has found it among the selections that there are.
    return lambda _: cost, table.identity.selection


def _choices(arguments: Namespace, inputs: AdviceInputs) -> list[Choice]:
    block_sizes = arguments.block_sizes
    if arguments.cost_table is not None:
        block_sizes = [inputs.costs(0).block_size]
    for name, values in (("block_size", block_sizes), ("base_budget", arguments.base_budgets)):
        for value in values:
            check_range(name, value, f"--{name.replace('_', '-')}s")
    micro_batches = arguments.micro_batches
    if micro_batches is None:
        micro_batches = [max(1, arguments.global_batch // inputs.job.data_parallel_size)]
    return [
        Choice(block_size=block, base_budget=budget, micro_batches=many, context_parallel_size=size)
        for block, budget, many, size in product(
            block_sizes, arguments.base_budgets, micro_batches, arguments.context_parallel_sizes
        )
    ]
