# SPDX-License-Identifier: Apache-2.0
"""The account of coverage that executed steps lost or gained against base budgets."""

from __future__ import annotations

from sparsebalance_megatron.config import CoverageMeanOver
from sparsebalance_megatron.learn.measurement import StepMeasurement
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.budgets.price import horizon_steps

_MAX_DEFICIT = 0.2
"""Coverage per sample of a horizon. A larger deficit or surplus is cut, so old steps expire. Plans
whose steps differ in length owe one another less than that."""
_RESERVE = 0.01
"""Coverage per sample of a horizon that is kept as a surplus, because what a step reaches differs
from what its plan expects."""
_RESERVE_OF_HEADROOM = 0.04
"""Largest reserve, as a share of what base budgets leave uncovered. Where they cover nearly
everything, more coverage costs the most and errors are as small."""


class CoverageAccount:
    """Sums, over samples, the coverage that steps lost against base budgets; a learner.

    A sample's coverage is the mean over its layers. ``deficit`` is the coverage lost over all
    steps, by what samples count; negative is a surplus.

    Args:
        global_batch_size: samples of a step; of the largest where they differ.
        mean_over: what a sample counts in the sum: 1, or its tokens.
        slack: by how much mean coverage may be below that of base budgets.
        steps: of a horizon; None is as many as plans look ahead.
    """

    def __init__(
        self,
        global_batch_size: int,
        mean_over: CoverageMeanOver = "samples",
        slack: float = 0.0,
        steps: int | None = None,
    ) -> None:
        self.deficit = 0.0
        self._mean_over = mean_over
        self._slack = slack
        self._base_mean: float | None = None
        self._sample_weight = 1.0
        """What a sample counts; by tokens the mean of the first step, so that limits stay."""
        self._samples = global_batch_size
        self._steps = steps or horizon_steps(global_batch_size)

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Enter a step, if any coverage was measured."""
        totals = measured.coverage
        if totals.count:
            lost, weight = totals.lost, 1.0
            if self._mean_over == "tokens":
                lost, weight = totals.lost_by_token, totals.tokens / totals.count
                if self._base_mean is None:
                    self._sample_weight = weight
            deficit = self.deficit + (lost - self._slack) * len(planned.samples) * weight
            limit = _MAX_DEFICIT * self._horizon_weight
            self.deficit = min(max(deficit, -limit), limit)
            self._base_mean = totals.base_mean

    def snapshot(self) -> float:
        """Coverage by which that of the next plan's horizon should exceed that of base budgets.

        It is the deficit and, once measured, the reserve; half of that where a horizon is one step,
        because two plans are made ahead before the first of them is executed and enters the
        account.
        """
        headroom = 0.0 if self._base_mean is None else 1.0 - self._base_mean
        reserve = min(_RESERVE, _RESERVE_OF_HEADROOM * headroom)
        wanted = self.deficit + reserve * self._horizon_weight
        return wanted if self._steps > 1 else wanted / 2

    @property
    def _horizon_weight(self) -> float:
        return self._sample_weight * self._samples * self._steps

    def state_dict(self) -> dict[str, float | None]:
        """The deficit, what a sample counts, and the coverage of base budgets."""
        return {
            "deficit": self.deficit,
            "sample_weight": self._sample_weight,
            "base_mean": self._base_mean,
        }

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Take over saved state."""
        self.deficit = float(state["deficit"] or 0.0)
        self._sample_weight = float(state["sample_weight"] or 1.0)
        self._base_mean = state["base_mean"]
