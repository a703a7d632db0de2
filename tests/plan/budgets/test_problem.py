# SPDX-License-Identifier: Apache-2.0
"""What budgets are chosen from: pinned ones are no choice, and their samples like no others."""

from __future__ import annotations

import numpy as np
from plan.plan_cases import cost_model, coverage_curves, job_shape, plan_settings

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.budgets.policy import budget_problem
from sparsebalance_megatron.plan.step_costs import step_costs

JOB = job_shape(2, 2)
BLOCKS = [5, 9, 9, 4, 3, 9]


def problem(pinned_S):
    """A problem of samples of BLOCKS blocks, with one pinned budget in all layers; 0 is free."""
    lengths = [64 * blocks for blocks in BLOCKS]
    costs = step_costs(lengths, JOB, cost_model(), StageScales.ones(1))
    pinned_LS = np.tile(np.array(pinned_S), (JOB.layers, 1))
    return budget_problem(plan_settings(), costs, coverage_curves(JOB.layers, 400), pinned_LS)


def test_a_pinned_budget_of_one_block_stays():
    allowed = problem([0, 1, 0, 7, 0, 0]).allowed
    for limit_LS in (allowed.floor_LS, allowed.base_LS, allowed.top_LS):
        assert (limit_LS[:, 1] == 1).all()
        assert (limit_LS[:, 3] == 7).all()
    assert (allowed.top_LS[:, 2] == 9).all()


def test_pinned_samples_are_like_no_other():
    sizes = problem([2, 3, 0, 2, 2, 0]).size_S
    assert sizes[2] == sizes[5]
    assert len(set(sizes.tolist())) == 5
