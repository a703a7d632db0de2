# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance plan``: what planning would do to your own lengths, before any GPU is used."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, get_args

from sparsebalance_megatron.cli.output import print_json, print_wrapped
from sparsebalance_megatron.cli.prediction_flags import (
    add_layout_flags,
    add_prediction_flags,
    add_segment_flags,
    check_flags,
    costs_of,
    progress_bar,
    samples_of,
    scenario_of,
)
from sparsebalance_megatron.config import Batching, Tuning
from sparsebalance_megatron.predict.even_stages import even_stages
from sparsebalance_megatron.predict.layouts import Choice
from sparsebalance_megatron.predict.outcome import (
    MOST_TRIES,
    Outcome,
    break_even_slowness,
    predict_rows,
    unhideable_steps,
)
from sparsebalance_megatron.predict.rows import (
    BASELINE,
    DENSE_BALANCED,
    ROWS,
    Variant,
    best_row,
    rows_of,
)
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.text_table import terminal_columns
from sparsebalance_megatron.view.predictions import (
    break_even_line,
    header_line,
    memory_sentence,
    outcome_legend,
    outcome_lines,
    remarks,
)


def add_flags(parser: ArgumentParser) -> None:
    """Add the flags of ``plan``."""
    parser.description = (
        "Plan global batches in order and predict their step times under every way to plan. "
        "Coverage is the prior (k/n)^0.35: no training run is read."
    )
    add_layout_flags(parser, required=True)
    add_segment_flags(parser)
    for flag, choices in (("--batching", Batching), ("--tuning", Tuning)):
        parser.add_argument(
            flag,
            choices=get_args(choices),
            help="plan this way only, beside the baseline; default: every way",
        )
    parser.add_argument("--plan-ms", type=float, help="search effort; default: 2 %% of the step")
    add_prediction_flags(parser)


def run(arguments: Namespace) -> int:
    """Plan, predict, print."""
    check_flags(arguments)
    costs, dp = costs_of(arguments), arguments.dp
    batch = arguments.global_batch or dp * arguments.micro_batches
    samples = samples_of(arguments, arguments.steps * batch)
    layout = Choice(
        tensor_parallel_size=arguments.tp or costs.tensor_parallel_size,
        pipeline_stages=arguments.pp,
        context_parallel_size=arguments.context_parallel_size,
        expert_parallel_size=arguments.ep,
        micro_batches=arguments.micro_batches * arguments.context_parallel_size,
        block_size=arguments.block_size or costs.block_size,
        base_budget=arguments.base_budget,
    )
    scenario = scenario_of(
        arguments,
        costs,
        samples,
        layout,
        ranks=dp,
        global_batch=batch,
        plan_ms=arguments.plan_ms,
        max_segments=arguments.max_segments,
        segment_tokens=arguments.segment_tokens,
    )
    workload = scenario.workload(samples.batches(batch, arguments.steps))
    header = header_line(workload, recompute=arguments.recompute, order=samples.order)
    found = print_rows([header], workload, _rows(arguments, workload), as_json=arguments.json)
    stages = even_stages(best_row(workload).of(workload))
    if arguments.json:
        layers = None if stages is None else stages.layers
        print_json(
            found | {"header": header, "costs": workload.cost.source, "layers_per_stage": layers}
        )
    elif stages is not None:
        print_wrapped([str(stages)])
    return 0


def _rows(arguments: Namespace, workload: Workload) -> Mapping[str, Variant]:
    """The chosen combination beside the baseline, or everything."""
    if arguments.batching is None and arguments.tuning is None:
        return rows_of(workload)
    chosen = Variant(arguments.batching or "makespan", arguments.tuning or "raise")
    return {BASELINE: ROWS[BASELINE], f"{chosen.batching}+{chosen.tuning}": chosen}


def print_rows(
    heading: list[str],
    workload: Workload,
    rows: Mapping[str, Variant],
    *,
    as_json: bool,
    with_legend: bool = True,
) -> dict[str, Any]:
    """Predict every row, and print a table unless JSON is asked for.

    Returns:
        The part of the JSON that ``plan`` and ``simulate`` have in common.
    """
    steps = len(workload.batches)
    watch = progress_bar("plan")(steps * len(rows))
    outcomes = predict_rows(workload, rows, watch=watch)
    best = _best(workload, outcomes)
    slowness, unhideable = _break_even(workload, outcomes, best), unhideable_steps(workload)
    if not as_json:
        columns = terminal_columns()
        print_wrapped(heading)
        print(*outcome_lines(outcomes, columns), sep="\n")
        print_wrapped(
            [
                *([break_even_line(workload, slowness)] if slowness is not None else []),
                memory_sentence(outcomes[best]),
                f"{steps} steps; in {unhideable} of them one sample alone takes longer than all "
                "work would, spread evenly: no placement makes such ranks equal",
                *remarks(workload),
            ]
        )
        if with_legend:
            print(*outcome_legend(outcomes, columns), sep="\n")
    efficiency = workload.cost.efficiency
    return {
        "steps": steps,
        "steps_with_unhideable_sample": unhideable,
        "break_even_slowness": slowness,
        "break_even_efficiency": efficiency.sparse / slowness if efficiency and slowness else None,
        "variants": {name: asdict(each) for name, each in outcomes.items()},
    }


def _best(workload: Workload, outcomes: Mapping[str, Outcome]) -> str:
    """The row that training plans by default, or else the last."""
    best = best_row(workload)
    names = [name for name, row in rows_of(workload).items() if row == best and name in outcomes]
    return [*outcomes, *names][-1]


def _break_even(workload: Workload, outcomes: Mapping[str, Outcome], best: str) -> float | None:
    """None where no dense row was asked for, or nothing to compare with it."""
    if DENSE_BALANCED not in outcomes or best == DENSE_BALANCED:
        return None
    planned = best_row(workload).of(workload)
    watch = progress_bar("break-even")(MOST_TRIES * len(workload.batches))
    return break_even_slowness(planned, outcomes[best], outcomes[DENSE_BALANCED], watch)
