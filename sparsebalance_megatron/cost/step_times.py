# SPDX-License-Identifier: Apache-2.0
"""What is learnt from a step's times: as predicted, and as measured.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from sparsebalance_megatron.cost.stage_scales import StageScales


class PredictedTimes(Protocol):
    """A planned step."""

    @property
    def times_2RPVM(self) -> np.ndarray:
        """Forward and backward ms of every micro-batch."""

    @property
    def scales(self) -> StageScales:
        """The factors that the predicted times contain."""


class MeasuredTimes(Protocol):
    """A measured step."""

    @property
    def times_2RPVM(self) -> np.ndarray:
        """Forward and backward ms of every micro-batch; NaN where unmeasured."""
