# SPDX-License-Identifier: Apache-2.0
"""The account of coverage that executed steps lost or gained against base budgets.

Shape legend: U length buckets, B means that are held: one, or one for each length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

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
_SHARE_DECAY = 0.9
"""Weight of the past in the moving average of how many samples belong to a mean."""


class CoverageAccount:
    """Sums, over samples, the coverage that steps lost against base budgets; a learner.

    A sample's coverage is the mean over its layers. ``deficit_B`` is the coverage lost over all
    steps, by what samples count; negative is a surplus.

    Args:
        global_batch_size: samples of a step; of the largest where they differ.
        mean_over: what a sample counts in the sum: its tokens, or 1.
        slack: by how much mean coverage may be below that of base budgets.
        steps: of a horizon; None is as many as plans look ahead.
        mean_of_U: which mean the samples of a length bucket belong to; None: there is one.
    """

    def __init__(
        self,
        global_batch_size: int,
        mean_over: CoverageMeanOver = "samples",
        slack: float = 0.0,
        steps: int | None = None,
        mean_of_U: np.ndarray | None = None,
    ) -> None:
        self._mean_of_U = np.zeros(1, dtype=np.int64) if mean_of_U is None else mean_of_U
        self.deficit_B = np.zeros(self._mean_of_U[-1] + 1)
        self._mean_over = mean_over
        self._slack = slack
        self._base_mean_B: np.ndarray | None = None
        self._sample_weight_B = np.ones_like(self.deficit_B)
        """What a sample of a step counts in each mean; by tokens that of the first step, so that
        limits stay."""
        self._samples = global_batch_size
        self._steps = steps or horizon_steps(global_batch_size)

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Enter a step, if any coverage was measured."""
        totals = measured.coverage
        if not totals.count:
            return
        lost_B, base_mean_B = np.array([totals.lost]), np.array([totals.base_mean])
        weight_B = np.ones(1)
        if self._mean_over == "tokens":
            lost_B[:], weight_B[:] = totals.lost_by_token, totals.tokens / totals.count
        elif len(self.deficit_B) > 1:
            executed_B, base_B, count_B = (
                np.bincount(self._mean_of_U, of_U) for of_U in totals.lengths_3U
            )
            weight_B, count_B = count_B / totals.count, np.maximum(count_B, 1.0)
            lost_B = (base_B - executed_B) / count_B
            before_B = np.ones_like(lost_B) if self._base_mean_B is None else self._base_mean_B
            base_mean_B = np.where(weight_B > 0.0, base_B / count_B, before_B)
        if self._base_mean_B is None:
            self._sample_weight_B = weight_B
        elif self._mean_over != "tokens":
            self._sample_weight_B = weight_B + _SHARE_DECAY * (self._sample_weight_B - weight_B)
        deficit_B = self.deficit_B + (lost_B - self._slack) * len(planned.samples) * weight_B
        # One sample of a rare length may owe as much as others.
        limit_B = _MAX_DEFICIT * np.maximum(self._horizon_weight_B, 1.0)
        self.deficit_B = np.clip(deficit_B, -limit_B, limit_B)
        self._base_mean_B = base_mean_B

    def snapshot(self) -> np.ndarray:
        """[B] coverage by which that of the next plan's horizon should exceed that of base budgets.

        It is the deficit and, once measured, the reserve; half of that where a horizon is one step,
        because two plans are made ahead before the first of them is executed and enters the
        account.
        """
        headroom_B = 0.0 if self._base_mean_B is None else 1.0 - self._base_mean_B
        reserve_B = np.minimum(_RESERVE, _RESERVE_OF_HEADROOM * headroom_B)
        wanted_B = self.deficit_B + reserve_B * self._horizon_weight_B
        return wanted_B if self._steps > 1 else wanted_B / 2

    @property
    def _horizon_weight_B(self) -> np.ndarray:
        return self._sample_weight_B * self._samples * self._steps

    def state_dict(self) -> dict[str, list[float] | None]:
        """The deficits, what a sample counts, and the coverage of base budgets."""
        return {
            "deficit": self.deficit_B.tolist(),
            "sample_weight": self._sample_weight_B.tolist(),
            "base_mean": None if self._base_mean_B is None else self._base_mean_B.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over saved state; that of older releases has numbers in place of lists of one.

        Raises:
            ValueError: it was saved where another number of means was held.
        """
        deficit_B = np.atleast_1d(state["deficit"])
        if deficit_B.shape != self.deficit_B.shape:
            raise ValueError(
                f"the checkpoint holds {len(deficit_B)} means of coverage, this run "
                f"{len(self.deficit_B)} (by --sparse-balance-coverage-mean-over and longest sample)"
            )
        self.deficit_B = deficit_B
        self._sample_weight_B = np.atleast_1d(state["sample_weight"])
        base_mean = state["base_mean"]
        self._base_mean_B = None if base_mean is None else np.atleast_1d(base_mean)
