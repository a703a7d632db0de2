# SPDX-License-Identifier: Apache-2.0
"""Calibration drills: slow stages show up, odd measurements do not, state survives exactly."""

from __future__ import annotations

import json

import numpy as np
import pytest
from cost.cost_cases import Times
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.step_planner import Calibration

SHAPE_RPVM = (2, 3, 2, 4)
STAGES, CHUNKS = SHAPE_RPVM[1:3]


class Drill:
    """A job of known slowness; predictions contain the current scales, as in training."""

    def __init__(self, noise: float = 0.0) -> None:
        self.calibration = Calibration(STAGES, CHUNKS)
        self.slowness_2PV = np.ones((2, STAGES, CHUNKS))
        self._noise = noise
        self._rng = np.random.default_rng(0)

    def step(self, spoil=lambda forward_RPVM, backward_RPVM: None) -> None:
        base_2RPVM = self._rng.uniform(1.0, 10.0, (2, *SHAPE_RPVM))
        jitter_2RPVM = np.exp(self._noise * self._rng.standard_normal(base_2RPVM.shape))
        measured = base_2RPVM * self.slowness_2PV[:, None, :, :, None] * jitter_2RPVM
        scales = self.calibration.snapshot()
        spoil(*measured)
        predicted_2RPVM = base_2RPVM * scales.factors_2RPV[..., None]
        self.calibration.update(Times(predicted_2RPVM, scales), Times(measured, scales))

    def scales_2PV(self) -> np.ndarray:
        return self.calibration.snapshot().scales_2PV.copy()


def test_a_wrong_cost_table_is_corrected_after_three_steps() -> None:
    drill = Drill()
    drill.slowness_2PV[:] = np.linspace(0.2, 30.0, drill.slowness_2PV.size).reshape(2, STAGES, -1)
    drill.step()
    drill.step()
    assert (drill.scales_2PV() == 1.0).all()
    drill.step()
    np.testing.assert_allclose(drill.scales_2PV(), drill.slowness_2PV)


def test_a_stage_that_turns_twice_as_slow_shows_up_within_twenty_steps() -> None:
    drill = Drill(noise=0.05)
    for _ in range(30):
        drill.step()
    drill.slowness_2PV[0, 1, 0] = 2.0
    for _ in range(20):
        drill.step()
    scales_2PV = drill.scales_2PV()
    assert scales_2PV[0, 1, 0] == pytest.approx(2.0, rel=0.1)
    scales_2PV[0, 1, 0] = 1.0
    np.testing.assert_allclose(scales_2PV, 1.0, rtol=0.1)


@pytest.mark.parametrize("factor", [100.0, 0.01])
@pytest.mark.parametrize("whole_step", [False, True])
def test_one_outlier_moves_nothing(factor: float, whole_step: bool) -> None:
    drill = Drill()
    for _ in range(9):
        drill.step()
    before = drill.scales_2PV()

    def spoil(forward_RPVM: np.ndarray, backward_RPVM: np.ndarray) -> None:
        forward_RPVM[... if whole_step else (0, 1, 0, 2)] *= factor

    drill.step(spoil)
    np.testing.assert_allclose(drill.scales_2PV(), before, rtol=1e-12)
    for _ in range(9):
        drill.step()
    np.testing.assert_allclose(drill.scales_2PV(), before, rtol=1e-12)


def test_long_micro_batches_outweigh_many_short_ones() -> None:
    calibration = Calibration(1)
    predicted = np.ones((2, 1, 1, 1, 5))
    predicted[..., -1] = 100.0
    measured = predicted * np.array([3.0, 3.0, 3.0, 3.0, 1.25])
    for _ in range(3):
        calibration.update(
            Times(predicted, StageScales.ones(1)), Times(measured, StageScales.ones(1))
        )
    assert (calibration.snapshot().scales_2PV == 1.25).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, 0.0, -1.0])
def test_impossible_measurements_are_ignored(value: float) -> None:
    drill, clean = Drill(noise=0.0), Drill(noise=0.0)
    for _ in range(5):
        drill.step(lambda forward, backward: backward.__setitem__((1, 2, 1, 0), value))
        clean.step()
    np.testing.assert_allclose(drill.scales_2PV(), clean.scales_2PV())


def test_a_stage_that_is_never_measured_keeps_its_scale() -> None:
    drill = Drill()
    drill.slowness_2PV[:] = 3.0
    for _ in range(5):
        drill.step(lambda forward, backward: forward[:, 2].fill(np.nan))
    scales_2PV = drill.scales_2PV()
    assert (scales_2PV[0, 2] == 1.0).all()
    np.testing.assert_allclose(scales_2PV[1], 3.0)


def test_predictions_may_be_older_than_the_current_scales() -> None:
    calibration = Calibration(1)
    predicted, measured = np.ones((2, 1, 1, 1, 1)), np.full((2, 1, 1, 1, 1), 2.0)
    measured[1] = 4.0
    for _ in range(20):
        calibration.update(
            Times(predicted, StageScales.ones(1)), Times(measured, StageScales.ones(1))
        )
    assert calibration.snapshot().scales_2PV.ravel() == pytest.approx([2.0, 4.0])


@settings(max_examples=25)
@given(ratios=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=25))
def test_scales_stay_within_what_was_observed(ratios: list[float]) -> None:
    drill = Drill()
    for ratio in ratios:
        drill.slowness_2PV[:] = ratio
        drill.step()
        low, high = min([1.0, *ratios]), max([1.0, *ratios])
        assert (drill.scales_2PV() >= low * (1 - 1e-9)).all()
        assert (drill.scales_2PV() <= high * (1 + 1e-9)).all()


@pytest.mark.parametrize("steps", [0, 2, 3, 7, 15])
def test_resumed_calibration_continues_exactly(steps: int) -> None:
    drill, other = Drill(noise=0.2), Drill(noise=0.2)
    for _ in range(steps):
        drill.step()
        other.step()
    saved = json.loads(json.dumps(drill.calibration.state_dict()))
    drill.calibration = Calibration(STAGES, CHUNKS)
    drill.calibration.load_state_dict(saved)
    assert drill.calibration.state_dict() == other.calibration.state_dict()
    for _ in range(4):
        drill.step()
        other.step()
    assert drill.calibration.state_dict() == other.calibration.state_dict()


def test_state_of_another_pipeline_is_refused_and_changes_nothing() -> None:
    calibration = Calibration(4, 1)
    before = calibration.state_dict()
    with pytest.raises(ValueError, match=r"\[3, 2\].* \[4, 1\]"):
        calibration.load_state_dict(Calibration(3, 2).state_dict())
    with pytest.raises(KeyError, match="history_W2PV"):
        calibration.load_state_dict({"scales_2PV": before["scales_2PV"]})
    assert calibration.state_dict() == before
