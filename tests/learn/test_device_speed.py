# SPDX-License-Identifier: Apache-2.0
"""Slow devices stand out, by what they are slower; equal ones and odd steps move nothing."""

from __future__ import annotations

import numpy as np
import pytest
from cost.cost_cases import Times
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.step_planner import DeviceSlowness

SHAPE_RPVM = (4, 2, 2, 3)
ALIKE_RP = np.ones(SHAPE_RPVM[:2])


class Drill:
    """Steps of a job whose devices are so slow; predictions contain the factors, as in training."""

    def __init__(self, slowness_RP, *, noise=0.02, seed=0):
        self.learner = DeviceSlowness(*SHAPE_RPVM[:2])
        self.slowness_RP, self.noise = np.asarray(slowness_RP), noise
        self.generator = np.random.default_rng(seed)

    def run(self, steps, spoil=lambda measured_2RPVM: None):
        for _ in range(steps):
            work_2RPVM = self.generator.uniform(1.0, 50.0, (2, *SHAPE_RPVM))
            jitter = np.exp(self.noise * self.generator.standard_normal(work_2RPVM.shape))
            measured_2RPVM = 1.3 * work_2RPVM * self.slowness_RP[..., None, None] * jitter
            spoil(measured_2RPVM)
            scales = StageScales.of(np.ones((2, *SHAPE_RPVM[1:3])), self.learner.snapshot())
            predicted_2RPVM = work_2RPVM * scales.factors_2RPV[..., None]
            self.learner.update(Times(predicted_2RPVM, scales), Times(measured_2RPVM, scales))
        return self.learner.snapshot()


def one_slow(factor):
    slowness_RP = ALIKE_RP.copy()
    slowness_RP[2, 1] = factor
    return slowness_RP


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.1))
def test_equal_devices_keep_a_factor_of_one(seed, noise):
    found_RP = Drill(ALIKE_RP, noise=noise, seed=seed).run(20)
    assert np.abs(found_RP - 1.0).max() <= 0.02
    assert (found_RP == 1.0).mean() > 0.8


@pytest.mark.parametrize("factor", [1.15, 1.5, 0.8])
def test_an_unequal_device_is_found_in_its_stage_alone(factor):
    found_RP = Drill(one_slow(factor)).run(20)
    assert found_RP[2, 1] == pytest.approx(factor, rel=0.04)
    assert abs(np.log(found_RP[2, 1])) < abs(np.log(factor)) + 0.01
    others = np.delete(found_RP.ravel(), 2 * 2 + 1)
    assert np.abs(others - 1.0).max() < 0.01


def test_nothing_moves_before_five_steps_and_recovery_is_noticed():
    drill = Drill(one_slow(1.3))
    assert (drill.run(4) == 1.0).all()
    assert drill.run(8)[2, 1] > 1.2
    drill.slowness_RP = ALIKE_RP
    assert drill.run(16)[2, 1] == pytest.approx(1.0, abs=0.02)


def test_odd_steps_and_missing_times_move_nothing():
    drill = Drill(ALIKE_RP)
    before = drill.run(10)

    def hiccup(measured_2RPVM):
        measured_2RPVM[:, 1] *= 5.0

    def lost(measured_2RPVM):
        measured_2RPVM[0, 0, 0, 0, 0] = np.nan

    drill.run(3, hiccup)
    assert drill.learner.snapshot() == pytest.approx(before, abs=0.02)
    kept = drill.learner.snapshot()
    drill.run(4, lost)
    assert (drill.learner.snapshot() == kept).all()


def test_two_ranks_share_the_difference():
    """Nobody knows which of two is the slow one; the stage's scale takes up the rest."""
    learner = DeviceSlowness(2, 1)
    scales = StageScales.ones(1)
    for step in range(8):
        predicted = np.full((2, 2, 1, 1, 4), 10.0 + step)
        measured = predicted * np.array([1.0, 1.44]).reshape(2, 1, 1, 1)
        learner.update(Times(predicted, scales), Times(measured, scales))
    slow, fast = learner.snapshot()[::-1, 0]
    assert slow / fast == pytest.approx(1.44, rel=0.05)


def test_a_single_rank_has_nobody_to_compare_with():
    learner = DeviceSlowness(1, 2)
    for _ in range(8):
        times, scales = np.ones((2, 1, 2, 1, 2)), StageScales.ones(2)
        learner.update(Times(times, scales), Times(3 * times, scales))
    assert (learner.snapshot() == 1.0).all()


def mean_step(slow_every, *, learns=True, steps=240):
    """Time of a step over that of an oracle: two ranks, one of them x1.5 slow in every second
    period of so many steps, work shared by what was known two steps before."""
    learner, scales = DeviceSlowness(2, 1), StageScales.ones(1)
    known, ratios = [np.ones(2)] * 2, []
    for step in range(steps):
        slowness_R = np.array([1.0, 1.5 if slow_every is None or step // slow_every % 2 else 1.0])
        share_R = (1.0 / known[-2]) / (1.0 / known[-2]).sum()
        ratios.append((share_R * slowness_R).max() * (1.0 / slowness_R).sum())
        work = np.tile(share_R.reshape(1, 2, 1, 1, 1), (2, 1, 1, 1, 4))
        slowness = StageScales.of(scales.scales_2PV, known[-2][:, None])
        predicted = work * known[-2].reshape(1, 2, 1, 1, 1)
        measured = work * slowness_R.reshape(1, 2, 1, 1, 1)
        learner.update(Times(predicted, slowness), Times(measured, slowness))
        known.append(learner.snapshot()[:, 0] if learns else np.ones(2))
    return np.mean(ratios[steps // 2 :])


@pytest.mark.parametrize("period", [3, 5, 10, 30])
def test_a_device_whose_speed_flips_is_not_worse_with_learning(period):
    assert mean_step(period) <= 1.01 * mean_step(period, learns=False)


def test_a_device_that_stays_slow_is_followed_at_once():
    assert mean_step(None) < 1.03 < 1.15 < mean_step(None, learns=False)
