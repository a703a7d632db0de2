# SPDX-License-Identifier: Apache-2.0
"""Which devices of a pipeline stage are slow, compared with those of the other ranks.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, W steps
of history (a window).
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep

_HISTORY_STEPS = 16
_FIRST_ESTIMATE_STEPS = 5
_MAD_TO_DEVIATION = 1.4826
"""Standard deviation over median absolute deviation of normally distributed values."""
_MIN_STANDARD_ERRORS = 3.0
"""Standard errors by which a rank must differ; only the difference beyond them counts."""
_MIN_DIFFERENCE = 0.02
"""Relative; smaller differences are ignored, however certain."""
_MIN_LASTING = 0.5
"""Share of the median's difference that the nearer quartile must have."""


class DeviceSlowness:
    """Learns how much longer every device takes for the same work than its stage's other ones.

    A step yields one ratio of measured to predicted time per device, relative to the median of its
    stage. How far its median over the last steps is from 1 counts beyond three standard errors, so
    that equal devices keep a factor of exactly 1 and noise moves nothing. It counts only where
    three of four steps show it: a plan that follows a device whose speed changes every few steps
    comes too late each time. Equal inputs give equal factors on every rank: nothing here is rounded
    differently by different processors.
    """

    def __init__(self, data_parallel_size: int, stages: int) -> None:
        self._history_WRP = np.empty((0, data_parallel_size, stages))

    def snapshot(self) -> np.ndarray:
        """Factors on predicted times, 1 where a device does not stand out; a copy."""
        steps = len(self._history_WRP)
        if steps < _FIRST_ESTIMATE_STEPS:
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
        predicted_RP, measured_RP = (
            (times_2RPVM[0] + times_2RPVM[1]).sum(axis=(2, 3))
            for times_2RPVM in (planned.times_2RPVM, measured.times_2RPVM)
        )
        times_2RP = np.stack([predicted_RP, measured_RP])
        if not (np.isfinite(times_2RP) & (times_2RP > 0.0)).all():
            return
        ratio_RP = measured_RP / predicted_RP * planned.scales.device_slowness_RP
        relative_RP = ratio_RP / np.median(ratio_RP, axis=0)
        kept = self._history_WRP[-(_HISTORY_STEPS - 1) :]
        self._history_WRP = np.concatenate([kept, relative_RP[None]])
