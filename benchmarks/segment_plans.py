# SPDX-License-Identifier: Apache-2.0
"""Simulated steps in segments: under wrong predictions, and with the tokens that stages hold.

    python benchmarks/segment_plans.py --steps 24 --json segment_plans.json

Every operation and every sample takes a factor drawn around 1 in place of what was predicted, the
same samples the same factors in fixed order, in one piece and in segments. Nothing is measured but
the CPU time of planning, which needs an idle machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.prediction import Workload
from sparsebalance_megatron.plan.pipeline.orders import most_tokens_in_flight
from sparsebalance_megatron.plan.segments.cuts import cut_at, makespans_ms
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.plan.step_plan import StepPlan
from sparsebalance_megatron.view.simulate.variants import (
    ALL_ROWS,
    BASELINE,
    SEGMENTED_ROWS,
    SETUPS,
    workload_of,
)

CASES = (("paper-main", "longalign"), ("paper-main", "chatqa2"), ("paper-ablation", "chatqa2"))
IN_ONE_PIECE = "ours, base coverage"
ERROR = 0.2
"""Standard deviation of the factors of operations and of samples."""
_LEAST_FACTOR = 0.2


def drawn(generator: np.random.Generator, *shape: int) -> np.ndarray:
    return np.maximum(generator.normal(1.0, ERROR, shape), _LEAST_FACTOR)


def makespan_ms(
    workload: Workload, plan: StepPlan, sample_factors: np.ndarray, operations: np.random.Generator
) -> float:
    """The step under errors; micro-batches in one piece are one segment, without its costs."""
    batch = workload.batches[plan.step]
    cost = workload.cost
    if all(each.segments == 1 for each in plan.micro_batches):
        free = replace(cost.segments, slowness=1.0, operation_ms=(0.0, 0.0))
        cost = replace(cost, segments=free)
    stages = workload.job.pipeline_stages
    costs = step_costs(batch, workload.job, cost, StageScales.ones(stages, 1))
    cuts = []
    for rank in range(plan.data_parallel_size):
        own = plan.for_rank(rank).micro_batches
        placed = [each.samples for each in own], [each.first_blocks for each in own]
        factors = [sample_factors[list(samples)].mean() for samples in placed[0]]
        cuts.append(
            [
                cut._replace(
                    forward_UP=cut.forward_UP * factor * drawn(operations, *cut.forward_UP.shape),
                    backward_UP=cut.backward_UP * factor * drawn(operations, *cut.forward_UP.shape),
                )
                for cut, factor in zip(
                    cut_at(costs, plan.budgets_LS, *placed), factors, strict=True
                )
            ]
        )
    return float(makespans_ms(cuts, np.ones((len(cuts), stages))).max())


def most_tokens(plan: StepPlan, stages: int, block_size: int) -> int:
    """On the fullest rank's stage that is the first of the last ``stages``."""
    return max(
        most_tokens_in_flight(
            [each.segment_tokens(block_size) for each in plan.for_rank(rank).micro_batches], stages
        )
        for rank in range(plan.data_parallel_size)
    )


def case(
    setup: str, data: str, steps: int, segment_tokens: int, clock: Callable[[], float]
) -> dict[str, Any]:
    config = SparseBalanceConfig(max_segments=8, segment_tokens=segment_tokens)
    workload = workload_of(SETUPS[setup], data, steps=steps, seed=0, config=config)
    rows = {BASELINE: ALL_ROWS[BASELINE], "one piece": ALL_ROWS[IN_ONE_PIECE], **SEGMENTED_ROWS}
    planned = {name: list(row.of(workload).planned_steps(clock)) for name, row in rows.items()}
    total_ms = {
        name: sum(step.plan.expectation.makespan_ms for step in of_row)
        for name, of_row in planned.items()
    }
    wrong_ms = dict.fromkeys(rows, 0.0)
    for name, of_row in planned.items():
        for step in of_row:
            number = step.plan.step
            factors = drawn(np.random.default_rng(number), len(workload.batches[number]))
            operations = np.random.default_rng(1000 + number)
            wrong_ms[name] += makespan_ms(workload, step.plan, factors, operations)
    block_size = workload.policy.block_size

    def held(name: str, stages: int) -> np.ndarray:
        return np.array([most_tokens(step.plan, stages, block_size) for step in planned[name]])

    over_one_piece = {
        name: held("ours-segments", stages) / held("one piece", stages)
        for name, stages in (("first stage", workload.job.pipeline_stages), ("last stage", 1))
    }
    return {
        "setup": setup,
        "data": data,
        "segment_tokens": segment_tokens,
        "speedup": {name: total_ms[BASELINE] / ms for name, ms in total_ms.items()},
        "speedup_with_errors": {name: wrong_ms[BASELINE] / ms for name, ms in wrong_ms.items()},
        "tokens_in_flight_over_one_piece": {
            name: {"mean": float(ratios.mean()), "largest": float(ratios.max())}
            for name, ratios in over_one_piece.items()
        },
        "plan_cpu_ms_median": float(np.median([step.plan_ms for step in planned["ours-segments"]])),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--json", type=Path, help="where to write the results")
    arguments = parser.parse_args()
    results = [
        case(*names, arguments.steps, tokens, time.process_time)
        for names in CASES
        for tokens in (4096, 1024)
    ]
    text = json.dumps({"steps": arguments.steps, "error": ERROR, "cases": results}, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
