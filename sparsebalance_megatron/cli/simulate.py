# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance simulate``: the paper's setups, predicted, with its numbers beside them."""

from __future__ import annotations

import json
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict

import numpy as np

from sparsebalance_megatron.cli.output import open_console
from sparsebalance_megatron.cli.workload_flags import (
    add_data_flags,
    add_model_flag,
    add_planning_flags,
    check_data_flags,
    check_seed,
    sharing_of,
    stored_lengths,
)
from sparsebalance_megatron.config import check_range
from sparsebalance_megatron.view.simulate.hf_sizes import model_named
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.setups import PAPER_ABLATION, SETUPS, Setup, workload_of
from sparsebalance_megatron.view.simulate.tables import show_variants
from sparsebalance_megatron.view.simulate.variants import (
    BASELINE,
    Variant,
    Workload,
    evaluate,
    unhideable_steps,
)

_MAX_STEPS = 10_000
"""Hours of planning at the largest setup."""


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``simulate``."""
    parser.description = (
        "Plan generated lengths, or those of stored documents, on a named setup and predict step "
        "times at counted layer costs of an H200."
    )
    parser.add_argument(
        "--setup", choices=tuple(SETUPS), required=True, help="named job on generated lengths"
    )
    parser.add_argument("--seed", type=int, help="default: 0, or 1234 with --data-path")
    add_data_flags(parser, parser)
    add_model_flag(parser)
    add_planning_flags(parser, steps=24)
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="ways to plan, by their names in the table; default: all; the baseline always is one",
    )
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
    check_data_flags(arguments)
    check_range("coverage_threshold", arguments.coverage_threshold, "--coverage-threshold")
    setup = SETUPS[arguments.setup]
    console = None if arguments.json else open_console(", or use --json")
    model = None if arguments.model is None else model_named(arguments.model)
    found = {}
    for data, lengths in _lengths(arguments, setup).items():
        workload = workload_of(
            setup,
            lengths,
            steps=arguments.steps,
            seed=arguments.seed or 0,
            coverage_threshold=arguments.coverage_threshold,
            sharing=sharing_of(arguments, setup.data_parallel_size),
            gigabytes_per_second=arguments.gigabytes_per_second,
            model=model,
        )
        outcomes = evaluate(workload, _rows(arguments, workload), time.perf_counter)
        unhideable = unhideable_steps(workload)
        found[data] = {
            "steps": arguments.steps,
            "steps_with_unhideable_sample": unhideable,
            "variants": {name: asdict(each) for name, each in outcomes.items()},
        }
        if console is not None:
            as_published = arguments.data_path is None and model is None
            ablation = arguments.setup == "paper-ablation" and as_published
            kind = f"{data}-like lengths" if arguments.data_path is None else data
            published = PAPER_ABLATION if ablation else None
            show_variants(console, f"{arguments.setup}, {kind}", outcomes, published)
            console.print(
                f"{arguments.steps} steps; {unhideable} hold a sample that no placement hides"
            )
    if console is None:
        print(json.dumps({"setup": arguments.setup, "data": found}, indent=2))
    return 0


def _rows(arguments: Namespace, workload: Workload) -> Mapping[str, Variant]:
    rows = workload.variants()
    wanted = {BASELINE, *(arguments.rows or rows)}
    if unknown := sorted(wanted - {*rows}):
        raise WorkloadError(f"--rows {unknown[0]}: must be of {'; '.join(rows)}")
    return {name: variant for name, variant in rows.items() if name in wanted}


def _lengths(arguments: Namespace, setup: Setup) -> Mapping[str, str | np.ndarray]:
    """Heading -> a distribution's name, or the lengths of stored documents."""
    if arguments.data_path is None:
        return {name: name for name in setup.data}
    samples = arguments.steps * setup.global_batch_size
    return {" ".join(arguments.data_path): stored_lengths(arguments, samples)}
