# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance advise``: what a job would take under several settings, before any is run."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path

from sparsebalance_megatron.cli.output import print_json, print_wrapped
from sparsebalance_megatron.cli.workload_flags import (
    add_layer_budgets_flag,
    add_lengths_flags,
    add_model_flag,
    add_output_flags,
    check_flags,
    checked_layer_budgets,
    lengths_in_order,
)
from sparsebalance_megatron.config import DEFAULT_SELECTION
from sparsebalance_megatron.cost.fit import fit_cost_model
from sparsebalance_megatron.cost.memory import GIBIBYTE, memory_lines
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import CostTable
from sparsebalance_megatron.plan.job import Job, whole_parts
from sparsebalance_megatron.text_table import terminal_columns
from sparsebalance_megatron.view.simulate.advice import AdviceInputs, Choice, advise, evened
from sparsebalance_megatron.view.simulate.lengths import batches_of, split_overlong
from sparsebalance_megatron.view.simulate.models import ModelPreset, counted_cost, model_named
from sparsebalance_megatron.view.simulate.tables import best_fitting, choice_lines, findings

ONLY_ACTIVATED = (
    "experts: times and memory count those that a token takes; weights of the others come on top"
)
MEMORY_SOURCE = (
    "weights, gradients and optimizer counted with the formula of Megatron's "
    "theoretical_memory_usage, without Megatron, for --sequence-parallel and "
    "--use-distributed-optimizer"
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``advise``."""
    parser.description = (
        "Predict step time, bubble and memory of your samples and your model over block sizes, "
        "budgets, micro-batches and context-parallel sizes. Times are estimated from counted "
        "operations unless a cost table is given."
    )
    add_lengths_flags(parser)
    parser.add_argument("--seed", type=int, help="of the order of --data-path; default: 1234")
    add_model_flag(parser, required=True)
    parser.add_argument("--gpus", type=int, required=True, help="of the job")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--global-batch", type=int, required=True, help="samples of a step")
    for flag, default, text in (
        ("--block-sizes", None, "tokens; default: 128 256 512, or that of the cost table"),
        ("--base-budgets", [16, 32, 64], "blocks"),
        ("--micro-batches", None, "per rank and step; default: one sample in each"),
        ("--context-parallel-sizes", [1], "ranks that share a sample, as --context-parallel-size"),
    ):
        parser.add_argument(flag, type=int, nargs="+", default=default, metavar="N", help=text)
    add_layer_budgets_flag(parser)
    parser.add_argument(
        "--recompute", choices=("none", "attention", "full"), default="none", help="in backward"
    )
    parser.add_argument("--cost-table", type=Path, help="written by `sparse-balance profile`")
    parser.add_argument("--gpu-memory", type=float, default=80.0, metavar="GIB", help="of one GPU")
    add_output_flags(parser, steps=2)


def run(arguments: Namespace) -> int:
    """Plan every choice, predict, print."""
    from tqdm import tqdm

    check_flags(arguments)
    inputs, block_sizes = _inputs(arguments)
    found = advise(
        inputs,
        _choices(arguments, inputs.job, block_sizes),
        partial(tqdm, desc="advise", unit="choice", disable=None),
    )
    chosen = best_fitting(found, arguments.gpu_memory)
    sentences = findings(found, arguments.gpu_memory, chosen)
    stages = evened(inputs, chosen.choice)
    if stages is not None:
        sentences = [*sentences, str(stages)]
    if arguments.json:
        print_json(
            {
                "costs": found.cost_source,
                "memory": MEMORY_SOURCE,
                "advice": sentences,
                "layers_per_stage": None if stages is None else stages.layers,
                "left_out": found.left_out,
                "choices": [
                    asdict(outlook) | {"fullest_gib": outlook.fullest_bytes / GIBIBYTE}
                    for outlook in found.outlooks
                ],
            }
        )
        return 0
    print("\n".join(choice_lines(found, arguments.gpu_memory, terminal_columns())))
    print_wrapped(
        [
            *sentences,
            *memory_lines(chosen.stages, MEMORY_SOURCE),
            f"costs: {found.cost_source}",
            *([ONLY_ACTIVATED] if model_named(arguments.model).activated else []),
            *(f"left out: {reason}" for reason in found.left_out),
        ]
    )
    return 0


def _inputs(arguments: Namespace) -> tuple[AdviceInputs, list[int]]:
    """The job to advise on, and the block sizes to try."""
    model = model_named(arguments.model)
    shape = model.on_ranks(arguments.tp)
    samples = arguments.steps * arguments.global_batch
    lengths = lengths_in_order(arguments, samples)
    if arguments.data_path is None and arguments.seq_length is not None:
        lengths = split_overlong(lengths, arguments.seq_length)
    ranks = whole_parts(arguments.gpus, "--gpus", {"--tp": arguments.tp, "--pp": arguments.pp})
    costs, selection, block_sizes = _costs(arguments, model)
    inputs = AdviceInputs(
        job=Job.even(layers=model.layers, ranks=ranks, stages=arguments.pp),
        shape=shape,
        tied_embeddings=model.tied_embeddings,
        batches=batches_of(
            lengths,
            arguments.global_batch,
            arguments.steps,
            arguments.lengths or arguments.data_path,
        ),
        costs=costs,
        selection=selection,
        layer_budgets=checked_layer_budgets(arguments, model.layers),
        seq_length=arguments.seq_length,
        recompute_all=arguments.recompute == "full",
        recompute_attention=arguments.recompute == "attention",
    )
    return inputs, block_sizes


def _costs(
    arguments: Namespace, model: ModelPreset
) -> tuple[Callable[[int], CostModel], str, list[int]]:
    """Block size -> costs, whose queries select, and the block sizes; a table knows one of each."""

    if arguments.cost_table is None:
        counted = partial(
            counted_cost,
            model,
            tensor_parallel_size=arguments.tp,
            device=arguments.counted_device,
            gigabytes_per_second=arguments.gigabytes_per_second,
        )
        block_sizes = arguments.block_sizes or [128, 256, 512]
        return lambda size: counted(block_size=size), DEFAULT_SELECTION, block_sizes
    run = model.on_ranks(arguments.tp).flat()
    # Megatron pads the vocabulary, and by how much is not known here.
    del run["shape.vocab_size"]
    table = CostTable.load(arguments.cost_table)
    for block_size in arguments.block_sizes or [table.identity.block_size]:
        table.check_matches(run | {"block_size": block_size})
    cost = fit_cost_model(table).with_bandwidth(arguments.gigabytes_per_second)
    return lambda _: cost, table.identity.selection, [cost.block_size]


def _choices(arguments: Namespace, job: Job, block_sizes: Sequence[int]) -> list[Choice]:
    return [
        Choice(block_size=block, base_budget=budget, micro_batches=many, context_parallel_size=size)
        for block, budget, size in product(
            block_sizes, arguments.base_budgets, arguments.context_parallel_sizes
        )
        for many in arguments.micro_batches
        or [max(1, arguments.global_batch * size // job.data_parallel_size)]
    ]
