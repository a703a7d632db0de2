# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance plan``: what planning would do to your own lengths, before any GPU is used."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.cli.output import open_console
from sparsebalance_megatron.cli.workload_flags import (
    add_lengths_flags,
    add_model_flag,
    add_planning_flags,
    check_at_least_one,
    check_data_flags,
    check_seed,
    lengths_in_order,
    sharing_of,
)
from sparsebalance_megatron.config import check_range
from sparsebalance_megatron.plan.job import whole_parts
from sparsebalance_megatron.view.simulate.hf_sizes import model_named
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.models import cost_of, with_bandwidth
from sparsebalance_megatron.view.simulate.setups import batches_of, default_policy, workload
from sparsebalance_megatron.view.simulate.tables import show_variants
from sparsebalance_megatron.view.simulate.variants import (
    ALL_ROWS,
    BASELINE,
    Variant,
    Workload,
    evaluate,
    unhideable_steps,
)

DEFAULT_MODEL = "qwen2.5-3b"

_CHECKED = (
    *("base_budget", "block_size", "coverage_threshold", "max_tokens_per_micro_batch", "plan_ms"),
)
"""Flags named after fields of the config, which says what they may be."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``plan``."""
    parser.description = (
        "Plan global batches drawn in order from a file of lengths, or from stored documents, and "
        "predict their step times. Coverage is the prior (k/n)^0.35: no training run is read."
    )
    add_lengths_flags(parser)
    parser.add_argument("--dp", type=int, required=True, help="data-parallel ranks")
    parser.add_argument("--pp", type=int, required=True, help="pipeline stages")
    parser.add_argument("--tp", type=int, default=1, help="tensor-parallel ranks (with --model)")
    parser.add_argument("--micro-batches", type=int, required=True, help="per rank and step")
    parser.add_argument("--global-batch", type=int, help="samples; default: dp x micro-batches")
    costs = parser.add_mutually_exclusive_group()
    costs.add_argument("--cost-table", type=Path, help="written by `sparse-balance profile`")
    add_model_flag(costs)
    parser.add_argument("--layers", type=int, help="of the model; needed with --cost-table")
    parser.add_argument(
        "--batching",
        choices=("arrival", "length", "latency", "makespan"),
        help="plan this way only, beside the baseline; default: every way",
    )
    parser.add_argument(
        "--tuning",
        choices=("off", "anchor", "makespan"),
        help="plan this way only, beside the baseline; default: every way",
    )
    parser.add_argument(
        "--anchor", choices=("mean", "min", "max"), default="mean", help="of anchor tuning"
    )
    parser.add_argument(
        "--base-budget", type=int, default=32, metavar="BLOCKS", help="budget before tuning"
    )
    parser.add_argument("--block-size", type=int, default=256, help="with --model, tokens")
    parser.add_argument("--max-tokens-per-micro-batch", type=int, help="default: no cap")
    parser.add_argument("--plan-ms", type=float, help="search effort; default: 2 %% of the step")
    add_planning_flags(parser, steps=20)
    parser.add_argument(
        "--seed", type=int, help="shuffle --lengths first; default: as filed; or of --data-path"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(arguments: Namespace) -> int:
    """Plan, predict, print.

    Raises:
        ConfigError: if a value is out of its range.
        WorkloadError: if the lengths, sizes or costs do not make a workload.
        PlanError: if a batch has no placement under the cap.
        OutputError: if rich is not installed.
    """
    planned = _workload(arguments)
    outcomes = evaluate(planned, _variants(arguments, planned), time.perf_counter)
    unhideable = unhideable_steps(planned)
    if arguments.json:
        found = {
            "steps": len(planned.batches),
            "costs": planned.cost.source,
            "steps_with_unhideable_sample": unhideable,
            "variants": {name: asdict(each) for name, each in outcomes.items()},
        }
        print(json.dumps(found, indent=2))
        return 0
    console = open_console(", or use --json")
    show_variants(console, f"{len(planned.batches)} steps; predicted", outcomes)
    console.print(f"costs: {planned.cost.source}", markup=False, highlight=False)
    console.print(f"steps with a sample that no placement hides: {unhideable}")
    return 0


def _variants(arguments: Namespace, planned: Workload) -> Mapping[str, Variant]:
    """The chosen combination beside the baseline, or everything."""
    if arguments.batching is None and arguments.tuning is None:
        return planned.variants()
    chosen = Variant(
        batching=arguments.batching or "makespan", tuning=arguments.tuning or "makespan"
    )
    return {BASELINE: ALL_ROWS[BASELINE], f"{chosen.batching}+{chosen.tuning}": chosen}


def _workload(arguments: Namespace) -> Workload:
    check_at_least_one(arguments, "dp", "pp", "tp", "micro_batches", "steps")
    for name in _CHECKED:
        if (value := getattr(arguments, name)) is not None:
            check_range(name, value, f"--{name.replace('_', '-')}")
    check_seed(arguments.seed)
    check_data_flags(arguments)
    sizes = {"--dp": arguments.dp, "--micro-batches": arguments.micro_batches}
    batch = arguments.global_batch
    if batch is None:
        batch = arguments.dp * arguments.micro_batches
    whole_parts(batch, "--global-batch", sizes)
    lengths = lengths_in_order(arguments, arguments.steps * batch)
    if arguments.data_path is None and arguments.seed is not None:
        lengths = np.random.default_rng(arguments.seed).permutation(lengths)
    batches = batches_of(lengths[: arguments.steps * batch], batch)
    if not batches:
        raise WorkloadError(f"{arguments.lengths}: {len(lengths)} lengths, a step needs {batch}")
    sharing = sharing_of(arguments, arguments.dp)
    cost, layers = cost_of(
        model_named(DEFAULT_MODEL if arguments.model is None else arguments.model),
        cost_table=arguments.cost_table,
        layers=arguments.layers,
        block_size=arguments.block_size,
        tensor_parallel_size=arguments.tp,
    )
    longest = int(lengths.max())
    policy = default_policy(
        block_size=cost.block_size,
        base_budget=arguments.base_budget,
        coverage_threshold=arguments.coverage_threshold,
        cap_tokens=arguments.max_tokens_per_micro_batch or longest * batch,
    )
    return workload(
        batches,
        layers=layers,
        ranks=arguments.dp,
        stages=arguments.pp,
        micro_batches=arguments.micro_batches,
        policy=replace(policy, anchor=arguments.anchor, plan_ms=arguments.plan_ms),
        cost=with_bandwidth(cost, arguments.gigabytes_per_second),
        longest_tokens=longest,
        sharing=sharing,
    )
