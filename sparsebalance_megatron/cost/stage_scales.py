# SPDX-License-Identifier: Apache-2.0
"""Factors on predicted times."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class StageScales:
    """Factors on the predicted forward and backward ms of every stage and chunk; read-only arrays.

    ``slowness_RP``: factors on top, of every data-parallel rank's device in a stage; None where
    all are alike.
    """

    scales_2PV: np.ndarray
    slowness_RP: np.ndarray | None = None

    @classmethod
    def ones(cls, stages: int, virtual_stages: int = 1) -> StageScales:
        """Predictions as the cost model makes them."""
        return cls.of(np.ones((2, stages, virtual_stages)))

    @classmethod
    def of(cls, scales_2PV: np.ndarray, slowness_RP: np.ndarray | None = None) -> StageScales:
        """Scales from copies of arrays."""
        return cls(
            scales_2PV=_read_only(scales_2PV),
            slowness_RP=None if slowness_RP is None else _read_only(slowness_RP),
        )

    @property
    def device_slowness_RP(self) -> np.ndarray:
        """``slowness_RP``; ones, and R is 1, where all are alike."""
        if self.slowness_RP is None:
            return np.ones((1, self.scales_2PV.shape[1]))
        return self.slowness_RP

    @property
    def factors_2RPV(self) -> np.ndarray:
        """All factors on predicted times; R may be 1."""
        return self.scales_2PV[:, None] * self.device_slowness_RP[..., None]


def _read_only(values: np.ndarray) -> np.ndarray:
    copied = np.array(values, dtype=np.float64)
    copied.setflags(write=False)
    return copied
