# SPDX-License-Identifier: Apache-2.0
"""Corrects predicted times by measured ones while training runs.

Shape legend: D data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, H steps
of history.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

_HISTORY_STEPS = 9
_FIRST_ESTIMATE_STEPS = 3
"""The first steps of a run are slow (allocation, compilation); the median of three outvotes one."""


@dataclass(frozen=True, kw_only=True)
class StageScales:
    """Factors on the predicted ms of every stage and chunk; read-only arrays.

    ``slowness_DP``: factors on top, of every data-parallel rank's device in a stage; None where
    all are alike.
    """

    forward_PV: np.ndarray
    backward_PV: np.ndarray
    slowness_DP: np.ndarray | None = None

    @classmethod
    def ones(cls, stages: int, virtual_stages: int = 1) -> StageScales:
        """Predictions as the cost model makes them."""
        return cls.of(np.ones((2, stages, virtual_stages)))

    @classmethod
    def of(cls, scales_2PV: np.ndarray, slowness_DP: np.ndarray | None = None) -> StageScales:
        """From forward and backward stacked; copies."""
        scales_2PV = np.array(scales_2PV, dtype=np.float64)
        scales_2PV.setflags(write=False)
        if slowness_DP is not None:
            slowness_DP = np.array(slowness_DP, dtype=np.float64)
            slowness_DP.setflags(write=False)
        return cls(forward_PV=scales_2PV[0], backward_PV=scales_2PV[1], slowness_DP=slowness_DP)

    @property
    def device_slowness_DP(self) -> np.ndarray:
        """``slowness_DP``; ones, and D is 1, where all are alike."""
        if self.slowness_DP is None:
            return np.ones((1, len(self.forward_PV)))
        return self.slowness_DP

    @property
    def factors_2DPV(self) -> np.ndarray:
        """All factors on predicted times, forward and backward; D may be 1."""
        scales_2PV = np.stack([self.forward_PV, self.backward_PV])
        return scales_2PV[:, None] * self.device_slowness_DP[..., None]


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
        decay: weight of the past in the exponential average, in [0, 1).

    Attributes:
        ignored_measurements: times left out because they, or their predictions, were not finite
            and positive.
    """

    def __init__(self, stages: int, virtual_stages: int = 1, *, decay: float = 0.8) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"calibration: decay {decay} must lie in [0, 1)")
        self._decay = decay
        self._scales_2PV = np.ones((2, stages, virtual_stages))
        # The oldest step first; NaN where a step measured nothing.
        self._history_H2PV = np.full((_HISTORY_STEPS, 2, stages, virtual_stages), np.nan)
        self.ignored_measurements = 0

    def scales(self) -> StageScales:
        """Current factors; later updates do not change what was returned."""
        return StageScales.of(self._scales_2PV)

    def update(
        self,
        *,
        predicted_forward_DPVM: np.ndarray,
        measured_forward_DPVM: np.ndarray,
        predicted_backward_DPVM: np.ndarray,
        measured_backward_DPVM: np.ndarray,
        predicted_with: StageScales | None = None,
    ) -> None:
        """Learn from one step. Times in ms, [D, P, V, M]; NaN where unmeasured.

        Args:
            predicted_with: the scales that the predictions contain; None: the current ones.

        Raises:
            ValueError: if shapes differ from one another or from the job's.
        """
        forward_PV = self._step_ratio(predicted_forward_DPVM, measured_forward_DPVM)
        backward_PV = self._step_ratio(predicted_backward_DPVM, measured_backward_DPVM)
        used = predicted_with or self.scales()
        used_2PV = np.stack([used.forward_PV, used.backward_PV])
        self._remember(used_2PV * np.stack([forward_PV, backward_PV]))

    def _step_ratio(self, predicted_DPVM: np.ndarray, measured_DPVM: np.ndarray) -> np.ndarray:
        """[P, V] weighted median of measured / predicted over a step; NaN if nothing counts."""
        predicted_DPVM = np.asarray(predicted_DPVM, dtype=np.float64)
        measured_DPVM = np.asarray(measured_DPVM, dtype=np.float64)
        job = self._scales_2PV.shape[1:]
        if predicted_DPVM.shape != measured_DPVM.shape or predicted_DPVM.shape[1:3] != job:
            raise ValueError(
                f"calibration: predicted {predicted_DPVM.shape} and measured "
                f"{measured_DPVM.shape} must both be [D, P, V, M] with [P, V] = {job}"
            )
        usable = _finite_and_positive(predicted_DPVM) & _finite_and_positive(measured_DPVM)
        self.ignored_measurements += int(usable.size - usable.sum())
        ratio_DPVM = np.full(usable.shape, np.nan)
        np.divide(measured_DPVM, predicted_DPVM, out=ratio_DPVM, where=usable)
        weight_DPVM = np.where(usable, predicted_DPVM, 0.0)
        ratio_NPV, weight_NPV = (
            np.moveaxis(values, (1, 2), (-2, -1)).reshape(-1, *job)
            for values in (ratio_DPVM, weight_DPVM)
        )
        return _weighted_median(ratio_NPV, weight_NPV)

    def _remember(self, ratio_2PV: np.ndarray) -> None:
        """Shift each cell's history by its own new ratio, then follow the median."""
        known_2PV = np.isfinite(ratio_2PV)
        shifted_H2PV = np.concatenate([self._history_H2PV[1:], ratio_2PV[None]])
        self._history_H2PV = np.where(known_2PV, shifted_H2PV, self._history_H2PV)
        steps_2PV = np.isfinite(self._history_H2PV).sum(axis=0)
        median_2PV = _median_over_known(self._history_H2PV)
        smooth_2PV = self._decay * self._scales_2PV + (1.0 - self._decay) * median_2PV
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
        cells = np.moveaxis(self._history_H2PV, 0, -1).reshape(-1, _HISTORY_STEPS)
        return {
            "scales_2PV": self._scales_2PV.tolist(),
            "cell_histories": [cell[np.isfinite(cell)].tolist() for cell in cells],
            "ignored_measurements": self.ignored_measurements,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over saved state.

        Raises:
            KeyError: if an entry is missing.
            ValueError: if it was saved for another number of stages; nothing is changed then.
        """
        scales_2PV = np.array(state["scales_2PV"], dtype=np.float64)
        histories = state["cell_histories"]
        ignored = int(state["ignored_measurements"])
        shape = self._scales_2PV.shape
        if scales_2PV.shape != shape or len(histories) != scales_2PV.size:
            raise ValueError(
                f"calibration: saved for [stages, virtual stages] {list(scales_2PV.shape[1:])} and "
                f"{len(histories)} histories, this run has {list(shape[1:])} and {math.prod(shape)}"
            )
        cells = np.full((len(histories), _HISTORY_STEPS), np.nan)
        for cell, history in zip(cells, histories, strict=True):
            recent = history[-_HISTORY_STEPS:]
            cell[_HISTORY_STEPS - len(recent) :] = recent
        self._scales_2PV = scales_2PV
        self._history_H2PV = np.moveaxis(cells.reshape(*shape, _HISTORY_STEPS), -1, 0).copy()
        self.ignored_measurements = ignored


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
