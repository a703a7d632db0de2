# SPDX-License-Identifier: Apache-2.0
"""The table of a dry run: every micro-batch of a small job, ranks of a large one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from plan import plan_cases

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.planner import plan_step
from sparsebalance_megatron.plan.step_problem import PlanInputs

report = pytest.importorskip("sparsebalance_megatron.run.dry_run_report")


def planned(
    ranks: int, micro_batches: int, lengths: list[int], *, stages: int = 1, **plan_settings: Any
) -> PlannedStep:
    job = plan_cases.job_shape(ranks, micro_batches, stages=stages)
    inputs = PlanInputs(
        lengths_tokens=tuple(lengths),
        job=job,
        plan_settings=plan_cases.plan_settings(**plan_settings),
        cost=plan_cases.cost_model(),
        scales=StageScales.ones(stages, 1),
        coverage=plan_cases.coverage_curves(job.layers),
    )
    return PlannedStep(
        plan=plan_step(0, inputs),
        samples=np.arange(len(lengths)),
        scales=inputs.scales,
        plan_ms=1.0,
        wait_ms=0.0,
    )


def test_of_many_ranks_the_slowest_and_fastest_are_shown_and_the_rest_counted() -> None:
    lengths = [100 + 37 * number for number in range(64)]
    step = planned(32, 2, lengths, batching="arrival", tuning="off")
    _, *rows, remark = report._micro_batches(step)
    assert len(rows) == 16
    ms = [float(row.split()[-1]) for row in rows]
    assert ms == sorted(ms, reverse=True)
    assert "16 ranks between the 8 slowest and the 8 fastest are left out" in remark
    assert rows[0].split()[0] == "31"


def test_segments_are_counted_where_a_step_has_them() -> None:
    step = planned(1, 2, [2**17, 3000], stages=4, max_segments=8, segment_tokens=4096)
    header, *rows = report._micro_batches(step)
    column = header.split().index("segments")
    segments = [each.segments for each in step.plan.micro_batches]
    assert max(segments) == 8
    assert [int(row.split()[column]) for row in rows] == segments
