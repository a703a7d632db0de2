# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance plan``: what planning would do to your own lengths, before any GPU is used."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import get_args

import numpy as np

from sparsebalance_megatron.cli.output import print_json, print_wrapped
from sparsebalance_megatron.cli.workload_flags import (
    add_lengths_flags,
    add_model_flag,
    add_output_flags,
    add_planning_flags,
    check_flags,
    check_seq_length_splits,
    checked_layer_budgets,
    lengths_in_order,
    max_cp_size,
    planned_outcomes,
    print_legend,
)
from sparsebalance_megatron.config import Batching, SparseBalanceConfig, Tuning
from sparsebalance_megatron.cost.fit import measured_cost_model
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.learn.prediction import Workload
from sparsebalance_megatron.plan.job import whole_parts
from sparsebalance_megatron.view.simulate.lengths import WorkloadError, batches_of
from sparsebalance_megatron.view.simulate.models import counted_cost, model_named
from sparsebalance_megatron.view.simulate.variants import (
    ALL_ROWS,
    BASELINE,
    ROWS_HELP,
    Variant,
    shared_job,
    variants_of,
    workload,
)

DEFAULT_MODEL = "qwen2.5-3b"


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``plan``."""
    parser.description = (
        "Plan global batches drawn in order from a file of lengths, or from stored documents, and "
        "predict their step times. Coverage is the prior (k/n)^0.35: no training run is read. "
        f"Rows: {ROWS_HELP}"
    )
    add_lengths_flags(parser)
    for flag, is_required, text in (
        ("--dp", True, "data-parallel ranks"),
        ("--pp", True, "pipeline stages"),
        ("--tp", False, "tensor-parallel ranks; default: 1, or the table's"),
        ("--micro-batches", True, "per rank and step"),
        ("--global-batch", False, "samples; default: dp x micro-batches"),
        ("--layers", False, "of the model; needed with --cost-table"),
        ("--block-size", False, "tokens; default: 256, or the table's"),
        ("--max-tokens-per-micro-batch", False, "default: no cap"),
    ):
        parser.add_argument(flag, type=int, required=is_required, help=text)
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--cost-table", type=Path, help="written by `sparse-balance profile`")
    add_model_flag(costs)
    for flag, choices in (("--batching", Batching), ("--tuning", Tuning)):
        parser.add_argument(
            flag,
            choices=get_args(choices),
            help="plan this way only, beside the baseline; default: every way",
        )
    parser.add_argument(
        "--anchor", choices=("mean", "min", "max"), default="mean", help="of anchor tuning"
    )
    parser.add_argument(
        "--base-budget", type=int, default=32, metavar="BLOCKS", help="budget before tuning"
    )
    parser.add_argument("--plan-ms", type=float, help="search effort; default: 2 %% of the step")
    add_planning_flags(parser)
    parser.add_argument(
        "--seed", type=int, help="shuffle --lengths first; default: as filed; or of --data-path"
    )
    add_output_flags(parser, steps=20)


def run(arguments: Namespace) -> int:
    """Plan, predict, print."""
    check_flags(arguments)
    check_seq_length_splits(arguments)
    planned = _workload(arguments)
    found = planned_outcomes("predicted", planned, _variants(arguments, planned), arguments.json)
    if arguments.json:
        print_json(found | {"costs": planned.cost.source})
    else:
        print_legend()
        print_wrapped([f"costs: {planned.cost.source}"])
    return 0


def _variants(arguments: Namespace, planned: Workload) -> Mapping[str, Variant]:
    """The chosen combination beside the baseline, or everything."""
    if arguments.batching is None and arguments.tuning is None:
        return variants_of(planned)
    chosen = Variant(arguments.batching or "makespan", arguments.tuning or "makespan")
    return {BASELINE: ALL_ROWS[BASELINE], f"{chosen.batching}+{chosen.tuning}": chosen}


def _workload(arguments: Namespace) -> Workload:
    sizes = {"--dp": arguments.dp, "--micro-batches": arguments.micro_batches}
    batch = arguments.global_batch
    if batch is None:
        batch = arguments.dp * arguments.micro_batches
    whole_parts(batch, "--global-batch", sizes)
    lengths = lengths_in_order(arguments, arguments.steps * batch)
    if arguments.data_path is None and arguments.seed is not None:
        lengths = np.random.default_rng(arguments.seed).permutation(lengths)
    cp_limit = max_cp_size(arguments, arguments.dp)
    cost, layers = _costs(arguments)
    longest = int(lengths.max())
    return workload(
        batches_of(lengths, batch, arguments.steps, arguments.lengths or arguments.data_path),
        job=shared_job(
            arguments.context_parallel_size,
            layers=layers,
            ranks=arguments.dp,
            stages=arguments.pp,
            micro_batches=arguments.micro_batches,
        ),
        config=SparseBalanceConfig(
            block_size=cost.block_size,
            base_budget=arguments.base_budget,
            layer_budgets=checked_layer_budgets(arguments, layers),
            coverage_threshold=arguments.coverage_threshold,
            anchor=arguments.anchor,
            plan_ms=arguments.plan_ms,
        ),
        cap_tokens=arguments.max_tokens_per_micro_batch or longest * batch,
        max_cp_size=cp_limit,
        cost=cost,
        longest_tokens=longest,
    )


def _costs(arguments: Namespace) -> tuple[CostModel, int]:
    """Costs and number of layers: of a measured table, or else of a public model.

    Raises:
        CostTableError: the table cannot be used, or was measured for other flags.
        WorkloadError: the number of layers is missing.
    """
    if arguments.cost_table is None:
        model = model_named(DEFAULT_MODEL if arguments.model is None else arguments.model)
        cost = counted_cost(
            model,
            block_size=arguments.block_size or SparseBalanceConfig().block_size,
            tensor_parallel_size=arguments.tp or 1,
            device=arguments.counted_device,
            gigabytes_per_second=arguments.gigabytes_per_second,
        )
        return cost, arguments.layers or model.layers
    if arguments.layers is None:
        raise WorkloadError(
            f"--cost-table {arguments.cost_table}: costs are per layer; add --layers"
        )
    given = {"block_size": arguments.block_size, "shape.tensor_parallel_size": arguments.tp}
    run = {name: value for name, value in given.items() if value is not None}
    cost = measured_cost_model(arguments.cost_table, run)
    return cost.with_bandwidth(arguments.gigabytes_per_second), arguments.layers
