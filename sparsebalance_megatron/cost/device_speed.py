# SPDX-License-Identifier: Apache-2.0
"""Which devices of a pipeline stage are slow, compared with those of the other ranks.

Shape legend: D data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, H steps
of history.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.cost.stage_calibration import StageScales

_HISTORY_STEPS = 16
_FIRST_ESTIMATE_STEPS = 5
_MAD_TO_DEVIATION = 1.4826
"""Of normally distributed values."""
_CERTAIN_DEVIATIONS = 3.0
"""Standard errors that a rank must stand out by; what is left above them is taken for real."""
_LEAST = 0.02
"""Relative; smaller differences are left alone, however certain."""


class DeviceSlowness:
    """Learns how much longer every device takes for the same work than its stage's other ones.

    A step yields one ratio of measured to predicted time per device, relative to the median of its
    stage. How far its median over the last steps is from 1 counts beyond three standard errors, so
    that equal devices keep a factor of exactly 1 and noise moves nothing. Equal inputs give equal
    factors on every rank: nothing here is rounded differently by different processors.

    Nothing is saved: after a restart a rank may run on another device.
    """

    def __init__(self, data_parallel_size: int, stages: int) -> None:
        self._history_HDP = np.empty((0, data_parallel_size, stages))

    def factors_DP(self) -> np.ndarray:
        """Factors on predicted times, 1 where a device does not stand out; a copy."""
        steps = len(self._history_HDP)
        if steps < _FIRST_ESTIMATE_STEPS:
            return np.ones(self._history_HDP.shape[1:])
        median_DP = np.median(self._history_HDP, axis=0)
        spread_DP = np.median(np.abs(self._history_HDP - median_DP), axis=0)
        error_DP = _MAD_TO_DEVIATION * spread_DP / np.sqrt(steps)
        doubt_DP = np.maximum(_CERTAIN_DEVIATIONS * error_DP, _LEAST)
        return median_DP - np.clip(median_DP - 1.0, -doubt_DP, doubt_DP)

    def update(
        self,
        *,
        predicted_forward_DPVM: np.ndarray,
        measured_forward_DPVM: np.ndarray,
        predicted_backward_DPVM: np.ndarray,
        measured_backward_DPVM: np.ndarray,
        predicted_with: StageScales,
    ) -> None:
        """Learn from one step. Times in ms, [D, P, V, M]; a step with a time missing is left out.

        Args:
            predicted_with: the scales that the predictions contain.
        """
        predicted_DP = (predicted_forward_DPVM + predicted_backward_DPVM).sum(axis=(2, 3))
        measured_DP = (measured_forward_DPVM + measured_backward_DPVM).sum(axis=(2, 3))
        times_2DP = np.stack([predicted_DP, measured_DP])
        if not (np.isfinite(times_2DP) & (times_2DP > 0.0)).all():
            return
        ratio_DP = measured_DP / predicted_DP * predicted_with.device_slowness_DP
        relative_DP = ratio_DP / np.median(ratio_DP, axis=0)
        kept = self._history_HDP[-(_HISTORY_STEPS - 1) :]
        self._history_HDP = np.concatenate([kept, relative_DP[None]])
