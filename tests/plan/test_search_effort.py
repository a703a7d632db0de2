# SPDX-License-Identifier: Apache-2.0
"""Effort is a count: the same plan whatever the clock says, and more of it never hurts."""

from __future__ import annotations

import time

import numpy as np
from plan.plan_cases import cost_model, job_shape, random_lengths

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search.annealing import anneal
from sparsebalance_megatron.plan.search.balance import arrival
from sparsebalance_megatron.plan.search.moves import Rules
from sparsebalance_megatron.plan.search_effort import OPERATIONS_PER_MS, SearchEffort
from sparsebalance_megatron.plan.step_costs import step_costs


def test_effort_is_spent():
    effort = SearchEffort(1.0)
    assert effort.affordable(100) < OPERATIONS_PER_MS // 100
    effort.spend(OPERATIONS_PER_MS // 2)
    assert 0 < effort.affordable(100) < OPERATIONS_PER_MS // 200
    effort.spend(OPERATIONS_PER_MS)
    assert effort.affordable(1) == 0


def placement_and_ms(plan_ms, seed=5):
    job = job_shape(4, 6, 4)
    lengths = random_lengths(48, seed, longest=60000)
    costs = step_costs(lengths, job, cost_model(), StageScales.ones(4))
    sample_2SC = costs.sample_ms(np.full((job.layers, 48), 8))
    start = Arrangement.of_groups(arrival(lengths, job, 1 << 40))
    found = anneal(start, costs, sample_2SC, rules=Rules(cap_tokens=1 << 40), plan_ms=plan_ms)
    return found.samples, makespans_ms(costs.micro_batch_ms(sample_2SC, found)).max()


def test_more_effort_finds_better_placements():
    ms = [placement_and_ms(plan_ms)[1] for plan_ms in (0.0, 1.0, 4.0, 64.0)]
    assert ms == sorted(ms, reverse=True)
    assert ms[-1] < 0.97 * ms[0]


def test_no_clock_is_read(monkeypatch):
    expected = placement_and_ms(2.0)[0]

    def forbidden():
        raise AssertionError("ranks would stop at different moments")

    for name in ("time", "perf_counter", "monotonic", "process_time", "perf_counter_ns"):
        monkeypatch.setattr(time, name, forbidden)
    assert placement_and_ms(2.0)[0] == expected
