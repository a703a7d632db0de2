# SPDX-License-Identifier: Apache-2.0
"""What measured times teach: corrections of predictions by stage, and devices that are slower."""

from typing import Any

import numpy as np

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.pipeline.operation_times import stage_busy_ms

_HISTORY_STEPS = 9
_FIRST_ESTIMATE_STEPS = 3
"""The first steps of a run are slow (allocation, compilation); the median of three outvotes one."""
_DECAY = 0.8
"""Weight of the past in the exponential average."""

_DEVICE_HISTORY_STEPS = 16
_FIRST_DEVICE_STEPS = 5
_MAD_TO_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation of normally distributed values."""
_MIN_STANDARD_ERRORS = 3.0
"""Standard errors by which a rank must differ; only the difference beyond them counts."""
_MIN_DIFFERENCE = 0.02
"""Relative; smaller differences are ignored, however certain."""
_MIN_LASTING = 0.5
"""Share of the median's difference that the nearer quartile must have."""


class Calibration:
    """Learns :class:`StageScales` from what every micro-batch took.

    Per stage, chunk and direction a step yields one ratio, the median over its micro-batches, each
    weighing as much as its predicted time: many short ones must not speak for the long ones that
    make up the step. The median of the last nine steps outvotes odd steps; an exponential average
    smooths what is left. Nothing moves before three steps have been seen; the first estimate is
    taken whole.

    Where some micro-batches of a step pass in segments and others in one piece, the latter speak
    for the stages, and the ratio of the two is learnt as well, as a median of nine such steps.
    """

    def __init__(self, stages: int, virtual_stages: int = 1) -> None:
        self._scales_2PV = np.ones((2, stages, virtual_stages))
        # The oldest step first; NaN where a step measured nothing.
        self._history_W2PV = np.full((_HISTORY_STEPS, 2, stages, virtual_stages), np.nan)
        self._cut_ratios: list[float] = []

    def snapshot(self) -> StageScales:
        """Current factors; later updates do not change what was returned."""
        known = len(self._cut_ratios) >= _FIRST_ESTIMATE_STEPS
        cut_ratio = float(np.median(self._cut_ratios)) if known else 1.0
        return StageScales.of(self._scales_2PV, cut_ratio=cut_ratio)

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from one step, leaving out times that are not finite and positive."""
        predicted_2RPVM, measured_2RPVM = planned.times_2RPVM, measured.own_2RPVM
        usable = _finite_and_positive(predicted_2RPVM) & _finite_and_positive(measured_2RPVM)
        ratio_2RPVM = np.full(usable.shape, np.nan)
        np.divide(measured_2RPVM, predicted_2RPVM, out=ratio_2RPVM, where=usable)
        weight_2RPVM = np.where(usable, predicted_2RPVM, 0.0)
        cut_2RPVM = np.broadcast_to(planned.cut_RM[:, None, None], usable.shape)
        if (weight_2RPVM[cut_2RPVM] > 0.0).any() and (weight_2RPVM[~cut_2RPVM] > 0.0).any():
            of_cut, of_whole = (
                float(_weighted_median(ratio_2RPVM[some], weight_2RPVM[some]))
                for some in (cut_2RPVM, ~cut_2RPVM)
            )
            ratio = planned.scales.cut_ratio * of_cut / of_whole
            self._cut_ratios = [*self._cut_ratios, ratio][-_HISTORY_STEPS:]
            weight_2RPVM[cut_2RPVM] = 0.0
        ratio_I2PV, weight_I2PV = (
            np.moveaxis(values, (1, 4), (0, 1)).reshape(-1, *self._scales_2PV.shape)
            for values in (ratio_2RPVM, weight_2RPVM)
        )
        ratio_2PV = planned.scales.scales_2PV * _weighted_median(ratio_I2PV, weight_I2PV)
        # Each cell's history is shifted where it has a new ratio, and its median followed.
        known_2PV = np.isfinite(ratio_2PV)
        shifted_W2PV = np.concatenate([self._history_W2PV[1:], ratio_2PV[None]])
        self._history_W2PV = np.where(known_2PV, shifted_W2PV, self._history_W2PV)
        steps_2PV = np.isfinite(self._history_W2PV).sum(axis=0)
        median_2PV = np.nanmedian(np.where(steps_2PV, self._history_W2PV, 0.0), axis=0)
        smooth_2PV = _DECAY * self._scales_2PV + (1.0 - _DECAY) * median_2PV
        self._scales_2PV = np.select(
            [~known_2PV | (steps_2PV < _FIRST_ESTIMATE_STEPS), steps_2PV == _FIRST_ESTIMATE_STEPS],
            [self._scales_2PV, median_2PV],
            default=smooth_2PV,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain Python types; floats survive exactly, and equal states compare equal."""
        history_W2PV = self._history_W2PV.astype(object)
        history_W2PV[np.isnan(self._history_W2PV)] = None
        return {
            "scales_2PV": self._scales_2PV.tolist(),
            "history_W2PV": history_W2PV.tolist(),
            "cut_ratios": list(self._cut_ratios),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved state; of another number of stages it is a ValueError."""
        scales_2PV, history_W2PV = (
            np.array(state[name], dtype=np.float64) for name in ("scales_2PV", "history_W2PV")
        )
        saved, own = history_W2PV.shape[1:], self._scales_2PV.shape
        if saved != own or scales_2PV.shape != own:
            raise ValueError(
                f"calibration: saved for [stages, virtual stages] {list(saved[1:])}, this run has "
                f"{list(own[1:])}"
            )
        self._scales_2PV, self._history_W2PV = scales_2PV, history_W2PV
        # Earlier releases learnt none.
        self._cut_ratios = list(state.get("cut_ratios", ()))


def _finite_and_positive(values: np.ndarray) -> np.ndarray:
    return np.isfinite(values) & (values > 0.0)


def _weighted_median(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Least value, along the first axis, that half of the weight does not exceed.

    Values of weight 0 may be NaN; the result is NaN where all weights are 0.
    """
    order = np.argsort(values, axis=0, kind="stable")
    values, weights = (np.take_along_axis(x, order, axis=0) for x in (values, weights))
    reached = np.cumsum(weights, axis=0)
    middle = (reached >= 0.5 * reached[-1]).argmax(axis=0)
    return np.take_along_axis(values, middle[None], axis=0)[0]


class DeviceSlowness:
    """Learns how much longer every device takes for the same work than its stage's other ones.

    It compares own times: ranks of a lockstep group take equally long, waiting included.

    A step yields one ratio of measured to predicted time per device, relative to the median of its
    stage. How far its median over the last steps is from 1 counts beyond three standard errors, so
    that equal devices keep a factor of exactly 1. It counts only where three of four steps show it:
    a plan that follows a device whose speed changes every few steps comes too late each time.
    """

    def __init__(self, data_parallel_size: int, stages: int) -> None:
        self._history_WRP = np.empty((0, data_parallel_size, stages))

    def snapshot(self) -> np.ndarray:
        """Factors on predicted times, 1 where a device does not stand out; a copy."""
        steps = len(self._history_WRP)
        if steps < _FIRST_DEVICE_STEPS:
            return np.ones(self._history_WRP.shape[1:])
        median_RP = np.median(self._history_WRP, axis=0)
        spread_RP = np.median(np.abs(self._history_WRP - median_RP), axis=0)
        error_RP = _MAD_TO_DEVIATION * spread_RP / np.sqrt(steps)
        doubt_RP = np.maximum(_MIN_STANDARD_ERRORS * error_RP, _MIN_DIFFERENCE)
        deviation_RP = median_RP - 1.0
        quartiles_2RP = np.quantile(self._history_WRP, [0.25, 0.75], axis=0) - 1.0
        nearest_RP = np.where(deviation_RP > 0.0, quartiles_2RP[0], quartiles_2RP[1])
        lasts_RP = nearest_RP * np.sign(deviation_RP) > _MIN_LASTING * np.abs(deviation_RP)
        return 1.0 + lasts_RP * (deviation_RP - np.clip(deviation_RP, -doubt_RP, doubt_RP))

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from one step; a step with a time missing is left out."""
        predicted_RP, measured_RP = map(stage_busy_ms, (planned.times_2RPVM, measured.own_2RPVM))
        times_2RP = np.stack([predicted_RP, measured_RP])
        if not (np.isfinite(times_2RP) & (times_2RP > 0.0)).all():
            return
        ratio_RP = measured_RP / predicted_RP * planned.scales.slowness_RP
        relative_RP = ratio_RP / np.median(ratio_RP, axis=0)
        kept = self._history_WRP[-(_DEVICE_HISTORY_STEPS - 1) :]
        self._history_WRP = np.concatenate([kept, relative_RP[None]])
