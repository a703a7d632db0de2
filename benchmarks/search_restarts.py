# SPDX-License-Identifier: Apache-2.0
r"""How far the planner's local search is from what many restarts of it find.

    OMP_NUM_THREADS=1 python benchmarks/search_restarts.py \
        --json benchmarks/results/search_restarts.json

Every global batch is placed as the planner does it, at the budgets expected after tuning. Then the
best placement so far is disturbed (two to four random exchanges between ranks) and searched again
without a limit, over and over. Prints total step time relative to the first search.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.plan.budgets.feasible import feasible_range
from sparsebalance_megatron.plan.placement import balance as batching
from sparsebalance_megatron.plan.placement.search import improve
from sparsebalance_megatron.plan.schedules.simulator import makespans_ms, schedule_name
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.simulate.setups import SETUPS, workload_of
from sparsebalance_megatron.simulate.variants import Workload

CASES = (("paper-main", "longalign"), ("paper-main", "chatqa2"), ("paper-ablation", "chatqa2"))
THRESHOLD = 0.1
_WITHOUT_LIMIT_MS = 1e9


def main() -> None:
    """Search, restart, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the numbers here")
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--restarts", type=int, nargs="+", default=[10, 40, 160])
    arguments = parser.parse_args()
    found = []
    for setup, data in CASES:
        workload = workload_of(
            SETUPS[setup], data, steps=arguments.steps, seed=0, coverage_threshold=THRESHOLD
        )
        generator = np.random.default_rng(0)
        total_ms = sum(
            best_after(workload, batch, arguments.restarts, generator) for batch in workload.batches
        )
        ratios = (total_ms / total_ms[0]).round(5).tolist()
        found.append({"setup": setup, "data": data, "restarts": [0, *arguments.restarts]})
        found[-1]["step_time_ratio"] = ratios
        print(json.dumps(found[-1]), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def best_after(
    workload: Workload,
    batch: Sequence[int],
    restarts: Sequence[int],
    generator: np.random.Generator,
) -> np.ndarray:
    """Least step ms of one global batch after 0 and after each number of restarts."""
    job, policy = workload.job, workload.policy
    costs = step_costs(batch, job, workload.cost, workload.scales)
    floor_LS = feasible_range(costs, workload.coverage, policy).floor_LS
    sample_ms = costs.sample_ms(floor_LS)
    schedule = schedule_name(job.pipeline_stages, job.virtual_stages)

    def searched(start: batching.Placement) -> tuple[float, batching.Placement]:
        found = improve(
            start,
            costs,
            *sample_ms,
            cap_tokens=policy.max_tokens_per_slot,
            schedule=schedule,
            plan_ms=_WITHOUT_LIMIT_MS,
        )
        slot_of_S = batching.slot_of_sample(found, len(batch))
        times = costs.slot_ms(*sample_ms, slot_of_S)
        return float(makespans_ms(*times, schedule=schedule).max()), found

    start = batching.balanced(
        sum(part.sum(axis=1) for part in sample_ms), batch, job, policy.max_tokens_per_slot
    )
    best_ms, best = searched(start)
    least_ms = [best_ms]
    for number in range(1, max(restarts) + 1):
        ms, placement = searched(disturbed(best, generator))
        if ms < best_ms:
            best_ms, best = ms, placement
        if number in restarts:
            least_ms.append(best_ms)
    return np.array(least_ms)


def disturbed(placement: batching.Placement, generator: np.random.Generator) -> Any:
    """Two to four exchanges of samples between random slots of random ranks."""
    ranks = [[list(slot) for slot in rank] for rank in placement]
    for _ in range(generator.integers(2, 5)):
        one, other = (
            ranks[rank][generator.integers(len(ranks[rank]))]
            for rank in generator.choice(len(ranks), 2, replace=False)
        )
        i, j = generator.integers(len(one)), generator.integers(len(other))
        one[i], other[j] = other[j], one[i]
    return tuple(tuple(tuple(slot) for slot in rank) for rank in ranks)


if __name__ == "__main__":
    main()
