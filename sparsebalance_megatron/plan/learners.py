# SPDX-License-Identifier: Apache-2.0
"""Everything that a planner learns from steps, by name."""

from __future__ import annotations

from collections.abc import Mapping

from sparsebalance_megatron.config import Calibration as CalibrationChoice
from sparsebalance_megatron.cost.device_speed import DeviceSlowness
from sparsebalance_megatron.cost.stage_calibration import Calibration
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.coverage_ledger import CoverageLedger
from sparsebalance_megatron.plan.planned_step import Learner
from sparsebalance_megatron.plan.step_plan import JobShape, PlanPolicy

IDLE_LEARNERS: Mapping[CalibrationChoice, tuple[str, ...]] = {
    "off": ("calibration", "device_speed"),
    "stages": ("device_speed",),
    "measured": (),
}
"""Which of them a choice of calibration lets rest."""


def make_learners(
    job: JobShape,
    policy: PlanPolicy,
    coverage: CoverageCurves,
    *,
    global_batch_size: int,
    horizon_steps: int | None = None,
) -> dict[str, Learner]:
    """The learners of one run, before it has observed anything.

    Args:
        coverage: the curves that learn, which are one of the learners.
        global_batch_size: samples of a step.
        horizon_steps: over which owed coverage is made up for; None is as many as plans look ahead.
    """
    return {
        "coverage_balance": CoverageLedger(
            global_batch_size, policy.coverage_mean_over, policy.coverage_slack, horizon_steps
        ),
        "coverage": coverage,
        "calibration": Calibration(job.pipeline_stages, job.virtual_stages),
        "device_speed": DeviceSlowness(job.data_parallel_size, job.pipeline_stages),
    }
