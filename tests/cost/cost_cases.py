# SPDX-License-Identifier: Apache-2.0
"""Predictions and steps that several tests learn from or compare with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.cost.model import CostModel, Direction, Part
from sparsebalance_megatron.cost.stage_scales import StageScales


def predict_ms(model: CostModel, part: Part, direction: Direction, rows: np.ndarray) -> np.ndarray:
    """Ms of feature vectors [..., 5], as [...]."""
    return rows @ model.coefficients_ms(part, direction)


@dataclass(frozen=True)
class Times:
    """What a learner sees of a planned or a measured step."""

    times_2RPVM: np.ndarray
    scales: StageScales
