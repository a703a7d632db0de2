# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance simulate``: the paper's setups, predicted."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping

import numpy as np

from sparsebalance_megatron.cli.output import print_json
from sparsebalance_megatron.cli.workload_flags import (
    add_data_flags,
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
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.learn.prediction import Workload
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.models import MODELS, model_named
from sparsebalance_megatron.view.simulate.variants import (
    BASELINE,
    ROWS_HELP,
    SETUPS,
    Setup,
    Variant,
    variants_of,
    workload_of,
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``simulate``."""
    parser.description = (
        "Plan generated lengths, or those of stored documents, on a named setup and predict step "
        f"times at counted layer costs. Rows: {ROWS_HELP}"
    )
    parser.add_argument(
        "--setup", choices=tuple(SETUPS), required=True, help="named job on generated lengths"
    )
    parser.add_argument("--seed", type=int, help="default: 0, or 1234 with --data-path")
    add_data_flags(parser, parser)
    add_model_flag(parser)
    add_planning_flags(parser)
    parser.add_argument(
        "--max-segments",
        type=int,
        default=1,
        metavar="N",
        help="segments in which a micro-batch may pass the pipeline; above 1 adds a row",
    )
    parser.add_argument(
        "--segment-tokens",
        type=int,
        default=SparseBalanceConfig.segment_tokens,
        metavar="T",
        help="least tokens of a segment",
    )
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="ways to plan, by their names in the table; default: all; the baseline always is one",
    )
    add_output_flags(parser, steps=24)


def run(arguments: Namespace) -> int:
    """Plan, predict, print."""
    check_flags(arguments)
    check_seq_length_splits(arguments)
    setup = SETUPS[arguments.setup]
    model = None if arguments.model is None else model_named(arguments.model)
    layers = (model or MODELS[setup.model]).layers
    layer_budgets = checked_layer_budgets(arguments, layers)
    found = {}
    for data, lengths in _lengths(arguments, setup).items():
        workload = workload_of(
            setup,
            lengths,
            steps=arguments.steps,
            seed=arguments.seed or 0,
            config=SparseBalanceConfig(
                coverage_threshold=arguments.coverage_threshold,
                gigabytes_per_second=arguments.gigabytes_per_second,
                counted_device=arguments.counted_device,
                layer_budgets=layer_budgets,
                max_segments=arguments.max_segments,
                segment_tokens=arguments.segment_tokens,
            ),
            model=model,
            context_parallel_size=arguments.context_parallel_size,
            max_cp_size=max_cp_size(arguments, setup.data_parallel_size),
        )
        generated = arguments.data_path is None
        found[data] = planned_outcomes(
            f"{arguments.setup}, {data}{'-like lengths' if generated else ''}",
            workload,
            _rows(arguments, workload),
            arguments.json,
        )
    if arguments.json:
        print_json({"setup": arguments.setup, "data": found})
    else:
        print_legend()
    return 0


def _rows(arguments: Namespace, workload: Workload) -> Mapping[str, Variant]:
    rows = variants_of(workload)
    wanted = {BASELINE, *(arguments.rows or rows)}
    if unknown := sorted(wanted - {*rows}):
        raise WorkloadError(f"--rows {unknown[0][:60]}: must be of {'; '.join(rows)}")
    return {name: variant for name, variant in rows.items() if name in wanted}


def _lengths(arguments: Namespace, setup: Setup) -> Mapping[str, str | np.ndarray]:
    """Heading -> a distribution's name, or the lengths of stored documents."""
    if arguments.data_path is None:
        return {name: name for name in setup.data}
    samples = arguments.steps * setup.global_batch_size
    return {" ".join(arguments.data_path): lengths_in_order(arguments, samples)}
