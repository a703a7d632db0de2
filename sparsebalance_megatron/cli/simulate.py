# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance simulate``: the paper's setups, predicted, with its numbers beside them."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace

from sparsebalance_megatron.cli.output import open_console
from sparsebalance_megatron.cli.sharing import add_sharing_flags, sharing_of
from sparsebalance_megatron.config import check_range
from sparsebalance_megatron.simulate.lengths import WorkloadError, check_seed
from sparsebalance_megatron.simulate.setups import PAPER_ABLATION, SETUPS, workload_of
from sparsebalance_megatron.simulate.tables import as_json, show
from sparsebalance_megatron.simulate.variants import evaluate, unhideable_steps

_MAX_STEPS = 10_000
"""Hours of planning at the largest setup."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``simulate``."""
    parser.description = (
        "Plan generated lengths on a named setup and predict step times at counted "
        "layer costs of an H200."
    )
    parser.add_argument(
        "--setup", choices=tuple(SETUPS), required=True, help="named job on generated lengths"
    )
    parser.add_argument("--steps", type=int, default=24, help="global batches to plan")
    parser.add_argument("--seed", type=int, default=0, help="of the lengths")
    parser.add_argument(
        "--coverage-threshold",
        type=float,
        default=0.1,
        metavar="P",
        help="coverage that a sample may lose",
    )
    add_sharing_flags(parser)
    parser.add_argument("--json", action="store_true", help="JSON instead of a table")


def run(arguments: Namespace) -> int:
    """Plan, predict, print.

    Raises:
        ConfigError, WorkloadError: if a value is out of its range.
        OutputError: if rich is not installed.
    """
    if not 1 <= arguments.steps <= _MAX_STEPS:
        raise WorkloadError(f"--steps {arguments.steps}: must be 1 to {_MAX_STEPS}")
    check_seed(arguments.seed)
    check_range("coverage_threshold", arguments.coverage_threshold, "--coverage-threshold")
    setup = SETUPS[arguments.setup]
    console = None if arguments.json else open_console(", or use --json")
    found = {}
    for data in setup.data:
        workload = workload_of(
            setup,
            data,
            steps=arguments.steps,
            seed=arguments.seed,
            coverage_threshold=arguments.coverage_threshold,
            sharing=sharing_of(arguments, setup.data_parallel_size),
            gigabytes_per_second=arguments.gigabytes_per_second,
        )
        outcomes = evaluate(workload, workload.variants(), time.perf_counter)
        unhideable = unhideable_steps(workload)
        found[data] = {
            "steps": arguments.steps,
            "steps_with_unhideable_sample": unhideable,
            "variants": as_json(outcomes),
        }
        if console is not None:
            published = PAPER_ABLATION if arguments.setup == "paper-ablation" else None
            show(console, f"{arguments.setup}, {data}-like lengths", outcomes, published)
            console.print(
                f"{arguments.steps} steps; {unhideable} hold a sample that no placement hides"
            )
    if console is None:
        print(json.dumps({"setup": arguments.setup, "data": found}, indent=2))
    return 0
