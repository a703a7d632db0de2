# SPDX-License-Identifier: Apache-2.0
"""Corrects predicted times by measured ones while training runs.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, W steps
of history (a window), I micro-batches of all ranks.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep

_HISTORY_STEPS = 9
_FIRST_ESTIMATE_STEPS = 3
"""The first steps of a run are slow (allocation, compilation); the median of three outvotes one."""
_DECAY = 0.8
"""Weight of the past in the exponential average."""


class Calibration:
    """Learns :class:`StageScales` from what every micro-batch took.

    Per stage, chunk and direction a step yields one ratio, the median over its micro-batches, each
    weighing as much as its predicted time: many short ones must not speak for the long ones that
    make up the step. The median of the last nine steps outvotes odd steps; an exponential average
    smooths what is left.
    Nothing moves before three steps have been seen; the first estimate is taken whole. Without
    randomness or clocks: equal inputs give equal scales on every rank.

    Args:
        stages, virtual_stages: P and V of the job.
    """

    def __init__(self, stages: int, virtual_stages: int = 1) -> None:
        self._scales_2PV = np.ones((2, stages, virtual_stages))
        # The oldest step first; NaN where a step measured nothing.
        self._history_W2PV = np.full((_HISTORY_STEPS, 2, stages, virtual_stages), np.nan)

    def snapshot(self) -> StageScales:
        """Current factors; later updates do not change what was returned."""
        return StageScales.of(self._scales_2PV)

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from one step, leaving out times that are not finite and positive."""
        ratio_2PV = self._ratio_2PV(planned.times_2RPVM, measured.times_2RPVM)
        self._remember(planned.scales.scales_2PV * ratio_2PV)

    def _ratio_2PV(self, predicted_2RPVM: np.ndarray, measured_2RPVM: np.ndarray) -> np.ndarray:
        """Weighted median of measured / predicted over a step; NaN if nothing counts."""
        usable = _finite_and_positive(predicted_2RPVM) & _finite_and_positive(measured_2RPVM)
        ratio_2RPVM = np.full(usable.shape, np.nan)
        np.divide(measured_2RPVM, predicted_2RPVM, out=ratio_2RPVM, where=usable)
        weight_2RPVM = np.where(usable, predicted_2RPVM, 0.0)
        ratio_I2PV, weight_I2PV = (
            np.moveaxis(values, (1, 4), (0, 1)).reshape(-1, *self._scales_2PV.shape)
            for values in (ratio_2RPVM, weight_2RPVM)
        )
        return _weighted_median(ratio_I2PV, weight_I2PV)

    def _remember(self, ratio_2PV: np.ndarray) -> None:
        """Shift each cell's history by its own new ratio, then follow the median."""
        known_2PV = np.isfinite(ratio_2PV)
        shifted_W2PV = np.concatenate([self._history_W2PV[1:], ratio_2PV[None]])
        self._history_W2PV = np.where(known_2PV, shifted_W2PV, self._history_W2PV)
        steps_2PV = np.isfinite(self._history_W2PV).sum(axis=0)
        median_2PV = _median_over_known(self._history_W2PV)
        smooth_2PV = _DECAY * self._scales_2PV + (1.0 - _DECAY) * median_2PV
        self._scales_2PV = np.select(
            [
                ~known_2PV | (steps_2PV < _FIRST_ESTIMATE_STEPS),
                steps_2PV == _FIRST_ESTIMATE_STEPS,
            ],
            [self._scales_2PV, median_2PV],
            default=smooth_2PV,
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain Python types; floats survive exactly, and equal states compare equal."""
        history_W2PV = self._history_W2PV.astype(object)
        history_W2PV[np.isnan(self._history_W2PV)] = None
        return {"scales_2PV": self._scales_2PV.tolist(), "history_W2PV": history_W2PV.tolist()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved state.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if it was saved for another number of stages; nothing is changed then.
        """
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


def _median_over_known(values: np.ndarray) -> np.ndarray:
    """Median over the first axis of what is not NaN; NaN where nothing is known."""
    known = np.isfinite(values).sum(axis=0, keepdims=True)
    # NaN sorts last. numpy's nanmedian goes through masked arrays, and this runs in every step.
    rising = np.sort(values, axis=0)
    middle = [np.maximum(known - 1, 0) // 2, known // 2]
    middle = np.minimum(np.concatenate(middle), len(values) - 1)
    return np.take_along_axis(rising, middle, axis=0).mean(axis=0)
