# SPDX-License-Identifier: Apache-2.0
"""Plans of 280 random problems are those that were recorded.

A change that is not meant to change plans must leave all of them alone. One that is meant to says
so in CHANGELOG.md and records them anew:

    PYTHONPATH=tests python tests/plan/test_golden_plans.py
"""

import hashlib
import itertools
import json
from dataclasses import replace
from operator import attrgetter
from pathlib import Path

import numpy as np
from plan.plan_cases import job_shape, planned, random_lengths, step_inputs

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.plan.step_plan import StepPlan

RECORD = Path(__file__).with_name("golden_plans.json")
PROBLEMS, FURTHER = 200, 80
"""Of ranks that neither share nor wait, in one piece; and of others, with dense documents."""
BATCHINGS = ("arrival", "length", "latency", "makespan")
TUNINGS = ("off", "anchor", "raise")
LAYOUTS = ((1, 1), (4, 1), (2, 2))
"""Stages and chunks of the three schedules."""
KINDS = ("spread", "long", "equal", "spread")
CHOICES = list(itertools.product(BATCHINGS, TUNINGS, LAYOUTS))


def golden_plan(number: int) -> StepPlan:
    """The plan of one problem: every choice in turn, some with slow devices or unseen coverage."""
    batching, tuning, (stages, chunks) = CHOICES[number % len(CHOICES)]
    generator = np.random.default_rng(number)
    ranks = int(generator.choice([1, 2, 4]))
    micro_batches = int(generator.choice([stages, 2 * stages, 3 * stages]))
    samples = ranks * micro_batches * int(generator.choice([1, 2, 4]))
    lengths = random_lengths(samples, number, longest=2**14, kind=KINDS[number % 4])
    job = job_shape(ranks, micro_batches, stages, chunks)
    scales_2PV = np.ones((2, stages, chunks))
    if number % 2:
        scales_2PV = generator.uniform(0.5, 2.0, scales_2PV.shape)
    slowness_RP = None
    if number % 5 == 0:
        slowness_RP = 1.0 + generator.uniform(0.0, 0.5, (ranks, stages)).round(3)
    inputs = step_inputs(
        *(job, lengths, number),
        observed=(1.0, 0.7, 0.0)[number % 7 % 3],
        batching=batching,
        tuning=tuning,
        coverage_threshold=(0.1, 0.3, 0.0)[number % 3],
        plan_ms=(20.0, 4.0)[number % 2],
    )
    return planned(number, **inputs | {"scales": StageScales.of(scales_2PV, slowness_RP)})


def further_plan(number: int) -> StepPlan:
    """The plan of a problem with dense documents: of lockstep groups, planned or equal cp_sizes, or
    segments, in turn."""
    generator = np.random.default_rng(number)
    ranks, positions = int(generator.choice([2, 4])), int(generator.choice([1, 2, 4]))
    stages = int(generator.choice([1, 2, 4]))
    job, changes = job_shape(ranks, positions, stages), {}
    match number % 4:
        case 0:
            job = replace(job, lockstep_ranks=ranks)
        case 1:
            changes = {"context_parallel": "dynamic", "max_cp_size": ranks}
        case 2:
            job = replace(job, context_parallel_size=2)
        case 3 if stages > 1:
            changes = {"max_segments": 4, "segment_tokens": 256}
    samples = ranks * positions * int(generator.choice([1, 2, 4]))
    lengths = random_lengths(samples, number, longest=2**14, kind=KINDS[number // 4 % 4])
    inputs = step_inputs(
        *(job, lengths, number),
        tuning=("off", "raise")[number // 4 % 2],
        dense_up_to=int(generator.choice([256, 1024, 4096])),
        layer_budgets=(None, "dense:0")[number // 8 % 2],
        plan_ms=4.0,
        **changes,
    )
    return planned(number, **inputs)


def _digest(plan: StepPlan) -> str:
    """A hash of the step and what runs where, under which budgets and in which pieces."""
    digest = hashlib.sha256(str(plan.step).encode())
    for each in sorted(plan.micro_batches, key=attrgetter("rank", "position")):
        place = each.rank, each.position, each.cp_size, each.segment_starts_blocks
        digest.update(repr((place, each.samples, each.lengths_tokens)).encode())
        digest.update(np.ascontiguousarray(each.budgets_LS, dtype=np.int32).tobytes())
    return digest.hexdigest()[:16]


def digests() -> list[str]:
    plans = [golden_plan(number) for number in range(PROBLEMS)]
    plans += [further_plan(number) for number in range(PROBLEMS, PROBLEMS + FURTHER)]
    return [_digest(plan) for plan in plans]


def test_plans_are_those_recorded() -> None:
    recorded = json.loads(RECORD.read_text())
    assert len(set(recorded)) == PROBLEMS + FURTHER
    found = digests()
    changed = [n for n, (new, old) in enumerate(zip(found, recorded, strict=True)) if new != old]
    assert changed == []


if __name__ == "__main__":
    RECORD.write_text(json.dumps(digests(), indent=0) + "\n")
