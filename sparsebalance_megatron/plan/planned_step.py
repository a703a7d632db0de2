# SPDX-License-Identifier: Apache-2.0
"""A plan together with what it was made for and from.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.step_plan import StepPlan


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A plan together with the samples it places.

    ``samples[i]`` is the training sample that the plan calls ``i``; ``scales`` are the cost
    corrections that its expectation contains. ``plan_ms`` is how long planning took on this rank,
    ``wait_ms`` how long the step waited for it.
    """

    plan: StepPlan
    samples: np.ndarray
    scales: StageScales
    plan_ms: float
    wait_ms: float

    @property
    def times_2RPVM(self) -> np.ndarray:
        """Predicted forward and backward ms of every micro-batch on every chunk."""
        return self.plan.expectation.times_2RPVM
