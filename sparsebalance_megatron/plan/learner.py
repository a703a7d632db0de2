# SPDX-License-Identifier: Apache-2.0
"""What the planner learns from while training runs."""

from __future__ import annotations

from typing import Any, Protocol

from sparsebalance_megatron.plan.measurement import StepMeasurement
from sparsebalance_megatron.plan.planned_step import PlannedStep


class Learner(Protocol):
    """Knowledge that steps add to. Equal steps give equal knowledge, on every rank."""

    def update(self, planned: PlannedStep, measured: StepMeasurement) -> None:
        """Learn from a step: what was planned of it, and what was measured on all ranks."""

    def snapshot(self) -> Any:
        """What a plan needs of it, as known now; later updates do not change it."""

    def state_dict(self) -> Any:
        """What is saved, in plain Python types; None where nothing is."""

    def load_state_dict(self, state: Any) -> None:
        """Take over saved state.

        Raises:
            ValueError: it does not fit this job; nothing is changed then.
        """
