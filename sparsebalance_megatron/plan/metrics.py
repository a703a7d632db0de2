# SPDX-License-Identifier: Apache-2.0
"""Imbalance of work, and utilisation of stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def imbalance(times_ms: np.ndarray | Sequence[float]) -> float:
    """Max over mean of whatever shares the work: 1 is perfect balance.

    It is NaN where a time is missing (NaN), and 1 where nothing takes any time.
    """
    values = np.asarray(times_ms, dtype=np.float64)
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def stage_busy_ms(times_2RPVM: np.ndarray) -> np.ndarray:
    """[R, P] ms of computation per stage: the sum over its micro-batches; NaN where one is."""
    return (times_2RPVM[0] + times_2RPVM[1]).sum(axis=(2, 3))


def rank_busy_ms(times_2RPVM: np.ndarray) -> np.ndarray:
    """[R] ms of the busiest stage of every data-parallel rank; NaN where a time is missing."""
    return stage_busy_ms(times_2RPVM).max(axis=1)


def rounded_ms(ms: float) -> float:
    """Ms rounded to nine digits, so that sums of equal times in another order tie."""
    return float(f"{ms:.8e}")
