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
_RESERVE_OF_HEADROOM = 0.04
"""The reserve takes no more of what base budgets leave uncovered: where they cover nearly all, more
costs the most and errors are as small."""


class CoverageLedger:
    """Coverage is summed over samples, a mean over layers.

    Args:
        global_batch_size: samples of a step; of the largest where they differ.
        mean_over: what a sample counts in the sum: 1, or its tokens over the mean of its step.
        slack: by how much mean coverage may be below that of base budgets.
        steps: of a horizon; None is as many as plans look ahead.

    Attributes:
        balance: coverage owed less what was executed, over all steps; negative is saved.
    """

    def __init__(
        self,
        global_batch_size: int,
        mean_over: CoverageMeanOver = "samples",
        slack: float = 0.0,
        steps: int | None = None,
    ) -> None:
        self.balance = 0.0
        self._mean_over = mean_over
        self._slack = slack
        self._base_mean: float | None = None
        self._samples = global_batch_size
        self._steps = steps or horizon_steps(global_batch_size)

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Enter a step, where any coverage was measured."""
        totals = measured.coverage
        if totals.count:
            limit = _LIMIT * self._samples * self._steps
            lost = totals.lost_by_token if self._mean_over == "tokens" else totals.lost
            balance = self.balance + (lost - self._slack) * len(planned.samples)
            self.balance = min(max(balance, -limit), limit)
            self._base_mean = totals.base_mean

    def snapshot(self) -> float:
        """By how much coverage of the horizon of the next plan should exceed what is wanted of it.

        All that is owed, and a horizon of one step half of it: planned ahead, two plans are made
        before the first of them is executed and enters. The reserve counts as owed from the first
        measurement on.
        """
        headroom = 0.0 if self._base_mean is None else 1.0 - self._base_mean
        reserve = min(_RESERVE, _RESERVE_OF_HEADROOM * headroom)
        owed = self.balance + reserve * self._samples * self._steps
        return owed if self._steps > 1 else owed / 2

    def state_dict(self) -> dict[str, float | None]:
        """The balance, and the coverage of base budgets that the reserve follows."""
        return {"balance": self.balance, "base_mean": self._base_mean}

    def load_state_dict(self, state: dict[str, float | None] | float) -> None:
        """Take over a balance; a number is one as earlier releases saved it."""
        saved = {"balance": state} if isinstance(state, int | float) else state
        self.balance = float(saved["balance"] or 0.0)
        self._base_mean = saved.get("base_mean")
