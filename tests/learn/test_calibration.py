# SPDX-License-Identifier: Apache-2.0
"""Slow stages and slow devices show up, odd measurements do not, state survives exactly."""

from dataclasses import replace

import numpy as np
import pytest
from cost.cost_cases import Times
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import step_measurement

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.learn.calibration import Calibration, DeviceSlowness

SHAPE_RPVM = (4, 3, 2, 4)
DEVICES_RP, (STAGES, CHUNKS) = SHAPE_RPVM[:2], SHAPE_RPVM[1:3]


class Drill:
    """Steps of a job of known slowness; predictions contain what was learnt, as in training."""

    def __init__(self, *, noise: float = 0.0, seed: int = 0) -> None:
        self.calibration = Calibration(STAGES, CHUNKS)
        self.devices = DeviceSlowness(*DEVICES_RP)
        self.slowness_2PV = np.ones((2, STAGES, CHUNKS))
        self.slowness_RP = np.ones(DEVICES_RP)
        self._noise, self._generator = noise, np.random.default_rng(seed)

    def run(self, steps: int, spoil=lambda forward_RPVM, backward_RPVM: None) -> None:
        for _ in range(steps):
            work_2RPVM = self._generator.uniform(1.0, 50.0, (2, *SHAPE_RPVM))
            jitter = np.exp(self._noise * self._generator.standard_normal(work_2RPVM.shape))
            slowness = StageScales.of(self.slowness_2PV, self.slowness_RP)
            own_2RPVM = work_2RPVM * slowness.factors_2RPV[..., None] * jitter
            spoil(*own_2RPVM)
            # Whatever ranks waited for others teaches nothing.
            waiting_2RPVM = self._generator.uniform(0.0, 50.0, own_2RPVM.shape)
            measured = step_measurement(own_2RPVM + waiting_2RPVM)
            measured = replace(measured, waiting_2RPVM=waiting_2RPVM)
            scales = StageScales.of(self.scales_2PV(), self.devices.snapshot())
            planned = Times(work_2RPVM * scales.factors_2RPV[..., None], scales)
            for learner in (self.calibration, self.devices):
                learner.update(planned, measured)

    def scales_2PV(self) -> np.ndarray:
        return self.calibration.snapshot().scales_2PV.copy()


def test_a_wrong_cost_table_is_corrected_after_three_steps() -> None:
    drill = Drill()
    drill.slowness_2PV[:] = np.linspace(0.2, 30.0, drill.slowness_2PV.size).reshape(2, STAGES, -1)
    drill.run(2)
    assert (drill.scales_2PV() == 1.0).all()
    drill.run(1)
    np.testing.assert_allclose(drill.scales_2PV(), drill.slowness_2PV)


def test_a_stage_that_turns_twice_as_slow_shows_up_within_twenty_steps() -> None:
    drill = Drill(noise=0.05)
    drill.run(30)
    drill.slowness_2PV[0, 1, 0] = 2.0
    drill.run(20)
    scales_2PV = drill.scales_2PV()
    assert scales_2PV[0, 1, 0] == pytest.approx(2.0, rel=0.1)
    scales_2PV[0, 1, 0] = 1.0
    np.testing.assert_allclose(scales_2PV, 1.0, rtol=0.1)


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("whole_step", [False, True])
def test_one_outlier_moves_nothing(factor: float, whole_step: bool) -> None:
    drill = Drill()
    drill.run(9)
    before = drill.scales_2PV()

    def spoil(forward_RPVM: np.ndarray, backward_RPVM: np.ndarray) -> None:
        forward_RPVM[... if whole_step else (0, 1, 0, 2)] *= factor

    drill.run(1, spoil)
    np.testing.assert_allclose(drill.scales_2PV(), before, rtol=1e-12)
    drill.run(9)
    np.testing.assert_allclose(drill.scales_2PV(), before, rtol=1e-12)


def test_long_micro_batches_outweigh_many_short_ones() -> None:
    """Also where predictions are older than the current scales."""
    calibration = Calibration(1)
    predicted = np.ones((2, 1, 1, 1, 5))
    predicted[..., -1] = 100.0
    measured = predicted * np.array([3.0, 3.0, 3.0, 3.0, 1.25])
    measured[1] *= 2
    for _ in range(20):
        calibration.update(Times(predicted, StageScales.ones(1)), step_measurement(measured))
    assert calibration.snapshot().scales_2PV.ravel() == pytest.approx([1.25, 2.5])


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_impossible_measurements_are_ignored(value: float) -> None:
    drill, clean = Drill(), Drill()
    drill.run(5, lambda forward, backward: backward.__setitem__((1, 2, 1, 0), value))
    clean.run(5)
    np.testing.assert_allclose(drill.scales_2PV(), clean.scales_2PV())


def test_a_stage_that_is_never_measured_keeps_its_scale() -> None:
    drill = Drill()
    drill.slowness_2PV[:] = 3.0
    drill.run(5, lambda forward, backward: forward[:, 2].fill(np.nan))
    scales_2PV = drill.scales_2PV()
    assert (scales_2PV[0, 2] == 1.0).all()
    np.testing.assert_allclose(scales_2PV[1], 3.0)


@settings(max_examples=25)
@given(ratios=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=25))
def test_scales_stay_within_what_was_observed(ratios: list[float]) -> None:
    drill = Drill()
    for ratio in ratios:
        drill.slowness_2PV[:] = ratio
        drill.run(1)
        low, high = min([1.0, *ratios]), max([1.0, *ratios])
        assert (drill.scales_2PV() >= low * (1 - 1e-9)).all()
        assert (drill.scales_2PV() <= high * (1 + 1e-9)).all()


def test_state_of_another_pipeline_is_refused_and_changes_nothing() -> None:
    calibration = Calibration(4, 1)
    before = calibration.state_dict()
    with pytest.raises(ValueError, match=r"\[3, 2\].* \[4, 1\]"):
        calibration.load_state_dict(Calibration(3, 2).state_dict())
    with pytest.raises(KeyError, match="history_W2PV"):
        calibration.load_state_dict({"scales_2PV": before["scales_2PV"]})
    assert calibration.state_dict() == before


def test_what_cutting_takes_is_learnt_apart_from_the_stages() -> None:
    """Predictions hold what was learnt; a step whose micro-batches are all cut teaches stages."""
    calibration, truth = Calibration(STAGES, CHUNKS), 1.27
    base_2RPVM = np.random.default_rng(0).uniform(1.0, 10.0, (2, *SHAPE_RPVM))
    for cut_M in [(True, False, False, True)] * 12 + [(True,) * 4] * 3:
        scales, cut = calibration.snapshot(), np.array(cut_M)
        predicted = base_2RPVM * scales.factors_2RPV[..., None] * np.where(cut, scales.cut_ratio, 1)
        measured = 3.0 * base_2RPVM * np.where(cut, truth, 1.0)
        calibration.update(Times(predicted, scales, cut_M), step_measurement(measured))
    assert calibration.snapshot().cut_ratio == pytest.approx(truth)
    np.testing.assert_allclose(calibration.snapshot().scales_2PV, 3.0)
    restored = Calibration(STAGES, CHUNKS)
    restored.load_state_dict(calibration.state_dict())
    assert restored.snapshot().cut_ratio == calibration.snapshot().cut_ratio


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.1))
def test_equal_devices_keep_a_factor_of_one(seed: int, noise: float) -> None:
    drill = Drill(noise=noise, seed=seed)
    drill.run(20)
    found_RP = drill.devices.snapshot()
    assert np.abs(found_RP - 1.0).max() <= 0.02
    assert (found_RP == 1.0).mean() > 0.8


def with_one_slow(factor: float) -> Drill:
    drill = Drill(noise=0.02)
    drill.slowness_2PV[:] = 1.3
    drill.slowness_RP[2, 1] = factor
    return drill


@pytest.mark.parametrize("factor", [1.15, 1.5, 0.8])
def test_an_unequal_device_is_found_in_its_stage_alone(factor: float) -> None:
    drill = with_one_slow(factor)
    drill.run(20)
    found_RP = drill.devices.snapshot()
    assert found_RP[2, 1] == pytest.approx(factor, rel=0.04)
    assert abs(np.log(found_RP[2, 1])) < abs(np.log(factor)) + 0.01
    found_RP[2, 1] = 1.0
    assert np.abs(found_RP - 1.0).max() < 0.01


def test_nothing_moves_before_five_steps_and_recovery_is_noticed() -> None:
    drill, found = with_one_slow(1.3), []
    for steps in (4, 1, 7):
        drill.run(steps)
        found.append(drill.devices.snapshot())
    assert (found[0] == 1.0).all()
    assert found[1][2, 1] > 1.0 and found[2][2, 1] > 1.2
    drill.slowness_RP[:] = 1.0
    drill.run(16)
    assert drill.devices.snapshot()[2, 1] == pytest.approx(1.0, abs=0.02)


def test_odd_steps_and_missing_times_move_nothing() -> None:
    drill = Drill(noise=0.02)
    drill.run(10)
    before = drill.devices.snapshot()

    def hiccup(*times_RPVM: np.ndarray) -> None:
        for each_RPVM in times_RPVM:
            each_RPVM[1] *= 5.0

    drill.run(3, hiccup)
    kept = drill.devices.snapshot()
    assert kept == pytest.approx(before, abs=0.02)
    drill.run(4, lambda forward, backward: forward.__setitem__((0, 0, 0, 0), np.nan))
    assert (drill.devices.snapshot() == kept).all()


def test_a_single_rank_has_nobody_to_compare_with() -> None:
    learner = DeviceSlowness(1, 2)
    for _ in range(8):
        times, scales = np.ones((2, 1, 2, 1, 2)), StageScales.ones(2)
        learner.update(Times(times, scales), step_measurement(3 * times))
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
        learner.update(Times(predicted, slowness), step_measurement(measured))
        known.append(learner.snapshot()[:, 0] if learns else np.ones(2))
    return np.mean(ratios[steps // 2 :])


@pytest.mark.parametrize("period", [3, 5, 10, 30])
def test_a_device_whose_speed_flips_is_not_worse_with_learning(period):
    assert mean_step(period) <= 1.01 * mean_step(period, learns=False)


def test_a_device_that_stays_slow_is_followed_at_once():
    assert mean_step(None) < 1.03 < 1.15 < mean_step(None, learns=False)
