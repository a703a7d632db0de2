# SPDX-License-Identifier: Apache-2.0
"""A plan that is allowed more is never predicted slower: 200 random jobs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from plan.plan_cases import (
    DEFAULT_TUNING,
    cost_model,
    coverage_curves,
    job_shape,
    plan_settings,
    random_lengths,
)

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_problem import PlanInputs

JOBS, GROUPS = 200, 20
ROUNDING = 1e-8
KINDS = ("spread", "giant", "equal", "spread")


def random_inputs(number: int) -> PlanInputs:
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
    return PlanInputs(
        lengths_tokens=tuple(lengths),
        job=job,
        plan_settings=plan_settings(
            tuning=str(draw(["off", DEFAULT_TUNING, DEFAULT_TUNING])),
            coverage_threshold=float(draw([0.0, 0.1, 0.3])),
            plan_ms=1.0,
        ),
        cost=costs,
        scales=StageScales.of(np.ones((2, stages, 1)), slowness_RP),
        coverage=coverage_curves(job.layers, seed=number),
    )


def allowed(number: int, inputs: PlanInputs) -> list[dict[str, object]]:
    """What may be planned of this job beside places and budgets."""
    job = inputs.job
    # Searches with one limit of cp_size and with another begin elsewhere; either may end lower.
    limit = (2, job.data_parallel_size)[number % 2]
    choices: list[dict[str, object]] = [
        {"context_parallel": "dynamic", "max_context_parallel": limit}
    ]
    if job.pipeline_stages > 1:
        choices.append({"max_segments": 4, "segment_tokens": 64})
    if job.pipeline_stages == 1:
        choices.append({"plans_positions": True})
    return choices


def slower(number: int) -> list[str]:
    """Every choice that made a plan slower."""
    inputs = random_inputs(number)

    def makespan_ms(**choices: object) -> float:
        allowing = replace(inputs.plan_settings, **choices)
        return plan_step(0, replace(inputs, plan_settings=allowing)).expectation.makespan_ms

    nothing_ms = makespan_ms()
    alone = [(choice, makespan_ms(**choice), nothing_ms) for choice in allowed(number, inputs)]
    every = {name: value for choice, *_ in alone for name, value in choice.items()}
    together = (every, makespan_ms(**every), min(ms for _, ms, _ in alone))
    return [
        f"{choice}: {ms} ms for {least_ms}"
        for choice, ms, least_ms in (*alone, together)
        if ms > least_ms * (1 + ROUNDING)
    ]


@pytest.mark.parametrize("group", range(GROUPS))
def test_a_plan_that_is_allowed_more_is_never_slower(group: int) -> None:
    found = {number: slower(number) for number in range(group, JOBS, GROUPS)}
    assert {number: defects for number, defects in found.items() if defects} == {}
