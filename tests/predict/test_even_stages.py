# SPDX-License-Identifier: Apache-2.0
"""Layers per stage: a heavy head takes layers off the last stage, by as much as is predicted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from plan.plan_cases import cost_model, plan_settings
from predict.predict_cases import memory_of

from sparsebalance_megatron.cost.model import CostModel, Part
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.comparison import even_stages
from sparsebalance_megatron.predict.workload import Workload, prior_coverage

BATCHES = ((900, 4000, 2500, 800, 1200, 600, 3000, 700),) * 2
LAYERS, STAGES = 12, 3


def workload(head_ms_per_token: float, stages: int = STAGES) -> Workload:
    model = cost_model()
    ends = {
        part: (0.0, 0.0, ms, 0.0, 0.0)
        for part, ms in ((Part.HEAD, head_ms_per_token), (Part.EMBEDDING, 0.0))
    }
    cost = replace(
        model,
        forward_ms={**model.forward_ms, **ends},
        backward_ms={**model.backward_ms, **ends},
    )
    assert isinstance(cost, CostModel)
    job = Job.even(layers=LAYERS, ranks=1, stages=stages, micro_batches=8)
    return Workload(
        batches=BATCHES,
        job=job,
        plan_settings=plan_settings(tuning="off"),
        cost=cost,
        coverage=prior_coverage(LAYERS, 64),
        memory=memory_of(job),
    )


def predicted_ms(given: Workload, layers: tuple[int, ...]) -> float:
    edges = itertools.pairwise(itertools.accumulate(layers, initial=0))
    stages = tuple((tuple(range(*ends)),) for ends in edges)
    steps = replace(given, job=replace(given.job, stage_layers=stages)).planned_steps()
    return sum(step.plan.expectation.makespan_ms for step in steps)


def test_a_heavy_head_takes_layers_off_the_last_stage() -> None:
    given = workload(head_ms_per_token=2e-3)
    found = even_stages(given)
    assert found is not None
    assert sum(found.layers) == LAYERS
    assert found.layers[-1] < LAYERS // STAGES
    gained = predicted_ms(given, (LAYERS // STAGES,) * STAGES) / predicted_ms(given, found.layers)
    assert found.speedup == pytest.approx(gained)
    assert found.speedup > 1.01


@pytest.mark.parametrize("given", [workload(0.0), workload(2e-3, stages=1)])
def test_equal_stages_and_no_pipeline_stay(given: Workload) -> None:
    assert even_stages(given) is None


def test_megatron_reads_the_layout() -> None:
    found = even_stages(workload(head_ms_per_token=2e-3))
    assert found is not None
    layout = PipelineParallelLayerLayout.from_str(found.layout, STAGES)
    assert [stage[0].count("decoder") for stage in _names(layout)] == list(found.layers)


def _names(layout: PipelineParallelLayerLayout) -> list[list[list[str]]]:
    return [[[each.name for each in chunk] for chunk in stage] for stage in layout.layout]
