# SPDX-License-Identifier: Apache-2.0
"""Plans of 200 random problems are those that were recorded.

A change that is not meant to change plans must leave all of them alone. One that is meant to says
so in CHANGELOG.md and records them anew:

    PYTHONPATH=tests python tests/plan/test_golden_plans.py
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
from plan.plan_cases import job_shape, planned, random_lengths, step_inputs

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.plan.step_plan import StepPlan

RECORD = Path(__file__).with_name("golden_plans.json")
PROBLEMS = 200
BATCHINGS = ("arrival", "length", "latency", "makespan")
TUNINGS = ("off", "anchor", "raise")
LAYOUTS = ((1, 1), (4, 1), (2, 2))
"""Stages and chunks of the three schedules."""
KINDS = ("spread", "giant", "equal", "spread")
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


def digests() -> list[str]:
    return [golden_plan(number).digest().hex()[:16] for number in range(PROBLEMS)]


def test_plans_are_those_recorded() -> None:
    recorded = json.loads(RECORD.read_text())
    assert len(set(recorded)) == PROBLEMS
    found = digests()
    changed = [n for n, (new, old) in enumerate(zip(found, recorded, strict=True)) if new != old]
    assert changed == []


if __name__ == "__main__":
    RECORD.write_text(json.dumps(digests(), indent=0) + "\n")
