# SPDX-License-Identifier: Apache-2.0
"""The ledger of coverage: what executed steps fell short of base budgets, or saved."""

from __future__ import annotations

from sparsebalance_megatron.config import CoverageMeanOver
from sparsebalance_megatron.plan.budgets.price import horizon_steps
from sparsebalance_megatron.plan.measurement import StepMeasurement
from sparsebalance_megatron.plan.planned_step import PlannedStep

_LIMIT = 0.05
"""Of coverage per sample of a horizon: what happened long ago is not made up for."""
_RESERVE = 0.01
"""Likewise, saved up at all times: what single steps reach differs from what they expect."""


class CoverageLedger:
    """Coverage is summed over samples, a mean over layers.

    Args:
        global_batch_size: samples of a step.
        mean_over: what a sample counts in the sum: 1, or its tokens over the mean of its step.

    Attributes:
        balance: coverage of base budgets less what was executed, over all steps; negative is saved.
    """

    def __init__(self, global_batch_size: int, mean_over: CoverageMeanOver = "samples") -> None:
        self.balance = 0.0
        self._mean_over = mean_over
        self._samples = global_batch_size
        self._steps = horizon_steps(global_batch_size)

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Enter a step, where any coverage was measured."""
        totals = measured.coverage
        if totals.count:
            limit = _LIMIT * self._samples * self._steps
            lost = totals.lost_by_token if self._mean_over == "tokens" else totals.lost
            balance = self.balance + lost * self._samples
            self.balance = min(max(balance, -limit), limit)

    def snapshot(self) -> float:
        """By how much coverage of the horizon of the next plan should exceed that of base budgets.

        All that is owed, and a horizon of one step half of it: planned ahead, two plans are made
        before the first of them is executed and enters.
        """
        owed = self.balance + _RESERVE * self._samples * self._steps
        return owed if self._steps > 1 else owed / 2

    def state_dict(self) -> float:
        """The balance."""
        return self.balance

    def load_state_dict(self, state: float) -> None:
        """Take over a balance."""
        self.balance = float(state)
