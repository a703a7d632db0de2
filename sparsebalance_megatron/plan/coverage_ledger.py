# SPDX-License-Identifier: Apache-2.0
"""The account of coverage: what executed steps fell short of base budgets, or saved."""

from __future__ import annotations

from sparsebalance_megatron.plan.budgets.price import horizon_steps

_LIMIT = 0.05
"""Of coverage per sample of a horizon: what happened long ago is not made up for."""
_RESERVE = 0.01
"""Likewise, saved up at all times: what single steps reach differs from what they expect."""


class CoverageAccount:
    """Coverage is summed over samples, a mean over layers.

    Args:
        global_batch_size: samples of a step.

    Attributes:
        balance: coverage of base budgets less what was executed, over all steps; negative is saved.
    """

    def __init__(self, global_batch_size: int) -> None:
        self.balance = 0.0
        self._samples = global_batch_size
        self._steps = horizon_steps(global_batch_size)

    def settle(self, *, base_mean: float, executed_mean: float) -> None:
        """Enter a step, by means over its samples and layers."""
        limit = _LIMIT * self._samples * self._steps
        balance = self.balance + (base_mean - executed_mean) * self._samples
        self.balance = min(max(balance, -limit), limit)

    @property
    def owed_coverage(self) -> float:
        """By how much the horizon of the next plan should exceed base budgets.

        All of it, and a horizon of one step half of it: planned ahead, two plans are made before
        the first of them is executed and enters.
        """
        owed = self.balance + _RESERVE * self._samples * self._steps
        return owed if self._steps > 1 else owed / 2
