# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance simulate``: named setups, predicted; two are the paper's."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import replace

from sparsebalance_megatron.cli.output import print_json
from sparsebalance_megatron.cli.plan import print_rows
from sparsebalance_megatron.cli.prediction_flags import (
    add_group_flags,
    add_prediction_flags,
    add_segment_flags,
    check_flags,
    costs_of,
    samples_of,
    scenario_of,
)
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.predict.layouts import Choice
from sparsebalance_megatron.predict.lengths import WorkloadError
from sparsebalance_megatron.predict.rows import BASELINE, Variant, rows_of
from sparsebalance_megatron.predict.scenario import SETUPS, Setup
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.view.predictions import header_line


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``simulate``."""
    parser.description = (
        "Plan generated lengths, or your own, on a named setup and predict step times."
    )
    parser.add_argument(
        "--setup", choices=tuple(SETUPS), required=True, help="named job on generated lengths"
    )
    add_group_flags(parser)
    add_segment_flags(parser)
    parser.add_argument(
        "--rows",
        nargs="+",
        metavar="ROW",
        help="ways to plan, by their names in the table; default: all; the baseline always is one",
    )
    add_prediction_flags(parser, lengths_required=False)


def run(arguments: Namespace) -> int:
    """Plan, predict, print."""
    check_flags(arguments)
    setup = SETUPS[arguments.setup]
    own = arguments.lengths is not None or arguments.data_path is not None
    names = (None,) if own else (arguments.lengths_from,) if arguments.lengths_from else setup.data
    found = {}
    for number, name in enumerate(names):
        workload, order, place = _workload(arguments, setup, name)
        place = place if own else f"{place}-like lengths"
        heading = [
            f"{arguments.setup}, {place}",
            header_line(workload, recompute=arguments.recompute, order=order),
        ]
        found[place.removesuffix("-like lengths")] = print_rows(
            heading,
            workload,
            _rows(arguments, workload),
            as_json=arguments.json,
            with_legend=number == len(names) - 1,
        )
    if arguments.json:
        print_json({"setup": arguments.setup, "data": found})
    return 0


def _workload(
    arguments: Namespace, setup: Setup, generator: str | None
) -> tuple[Workload, str, str]:
    """The setup's job, the order of its samples, and where they come from."""
    costs = costs_of(arguments, setup.model)
    batch = setup.global_batch_size
    samples = samples_of(arguments, arguments.steps * batch, generator)
    layout = Choice(
        tensor_parallel_size=setup.tensor_parallel_size,
        pipeline_stages=setup.pipeline_stages,
        context_parallel_size=arguments.context_parallel_size,
        expert_parallel_size=arguments.ep,
        micro_batches=setup.micro_batches * arguments.context_parallel_size,
        block_size=costs.block_size,
        base_budget=SparseBalanceConfig.base_budget,
    )
    scenario = scenario_of(
        arguments,
        costs,
        samples,
        layout,
        ranks=setup.data_parallel_size,
        global_batch=batch,
        max_segments=arguments.max_segments,
        segment_tokens=arguments.segment_tokens,
    )
    scenario = replace(scenario, lockstep_ranks=setup.lockstep_ranks)
    batches = samples.batches(batch, arguments.steps)
    return scenario.workload(batches), samples.order, str(samples.place)


def _rows(arguments: Namespace, workload: Workload) -> Mapping[str, Variant]:
    rows = rows_of(workload)
    wanted = {BASELINE, *(arguments.rows or rows)}
    if unknown := sorted(wanted - {*rows}):
        raise WorkloadError(f"--rows {unknown[0][:60]}: must be of {'; '.join(rows)}")
    return {name: variant for name, variant in rows.items() if name in wanted}
