# SPDX-License-Identifier: Apache-2.0
"""A plan that is allowed more is never predicted slower: 200 random jobs."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from plan.plan_cases import (
    DEFAULT_TUNING,
    changed,
    cost_model,
    job_shape,
    planned,
    random_lengths,
    step_inputs,
)

from sparsebalance_megatron.cost.exchange import Exchange

JOBS, GROUPS = 200, 20
ROUNDING = 1e-8
KINDS = ("spread", "long", "equal", "spread")


def random_inputs(number: int) -> dict[str, Any]:
    """A job of at most 4 ranks, 4 stages and 4 positions that plans nothing beside places and
    budgets."""
    generator = np.random.default_rng(number)
    draw = generator.choice
    ranks, stages, positions = int(draw([2, 4])), int(draw([1, 2, 4])), int(draw([1, 2, 3, 4]))
    cp_size = int(draw([1, 1, 2]))
    job = replace(
        job_shape(ranks, positions, stages),
        context_parallel_size=cp_size,
        lockstep_ranks=int(draw([1, 1, ranks])) if number % 3 == 0 else 1,
    )
    samples = job.places // cp_size * int(draw([1, 2, 4]))
    lengths = random_lengths(samples, number, longest=2**15, kind=KINDS[number % 4])
    costs = replace(
        cost_model(),
        exchange=Exchange(
            bytes_per_token=512.0,
            gradient_bytes_per_token=1024.0,
            ms_per_byte=float(draw([1e-9, 1e-6])),
            loss=float(draw([0.0, 0.2])),
            cp_size_slowness=((2, 1.0), (4, float(draw([1.0, 8.0])))),
        ),
    )
    slowness_RP = np.ones((ranks, stages))
    if number % 5 == 0:
        slowness_RP = 1.0 + generator.uniform(0.0, 0.5, (ranks, stages)).round(3)
    return step_inputs(
        *(job, lengths, number),
        cost=costs,
        slowness_RP=slowness_RP,
        tuning=str(draw(["off", DEFAULT_TUNING, DEFAULT_TUNING])),
        coverage_threshold=float(draw([0.0, 0.1, 0.3])),
        plan_ms=1.0,
    )


def makespans_ms(number: int) -> list[float]:
    """Makespans of plans that may share samples between two ranks or between all, plan something
    else beside places and budgets, or both; first that of one that may do neither."""
    inputs = random_inputs(number)
    job = inputs["job"]
    few, all_ranks = (
        {"context_parallel": "dynamic", "max_cp_size": limit}
        for limit in (2, job.data_parallel_size)
    )
    other: dict[str, object] = {"positions": "planned"}
    if job.pipeline_stages > 1:
        other = {"max_segments": 4, "segment_tokens": 64}
    sharing = (few, all_ranks)[number % 2]
    return [
        planned(**changed(inputs, **choices)).expectation.makespan_ms
        for choices in ({}, few, all_ranks, other, sharing | other)
    ]


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_plan_that_is_allowed_more_is_never_slower(group: int) -> None:
    for number in range(group, JOBS, GROUPS):
        nothing_ms, few_ms, all_ranks_ms, other_ms, both_ms = makespans_ms(number)
        sharing_ms = (few_ms, all_ranks_ms)[number % 2]
        assert max(few_ms, other_ms) <= nothing_ms * (1 + ROUNDING), f"job {number}"
        assert all_ranks_ms <= few_ms * (1 + ROUNDING), f"job {number}"
        assert both_ms <= min(sharing_ms, other_ms) * (1 + ROUNDING), f"job {number}"
