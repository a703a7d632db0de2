# SPDX-License-Identifier: Apache-2.0
"""Layers per pipeline stage that make up for the embedding and the output head.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches; a leading
2: forward and backward.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.learn.prediction import Workload

LEAST_SPEEDUP = 1.01
"""Smaller gains are within the error of predictions and are not named."""


@dataclass(frozen=True, kw_only=True)
class EvenStages:
    """``layers``: of each stage. ``speedup``: predicted, over the job's own layers per stage."""

    layers: tuple[int, ...]
    speedup: float

    @property
    def layout(self) -> str:
        """The value of Megatron's ``--pipeline-model-parallel-layout``.

        >>> EvenStages(layers=(10, 9, 7), speedup=1.05).layout
        'Et*10|t*9|t*7L'
        """
        return f"E{'|'.join(f't*{layers}' for layers in self.layers)}L"

    def __str__(self) -> str:
        return (
            f"stages do unequal work: with --pipeline-model-parallel-layout '{self.layout}' steps "
            f"are predicted to be {self.speedup:.2f} times as fast"
        )


def even_stages(workload: Workload) -> EvenStages | None:
    """Move layers from the busiest stage to the idlest while the predicted steps get shorter.

    None where that gains less than :data:`LEAST_SPEEDUP`, without a pipeline, and with virtual
    stages.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    job = workload.job
    if job.pipeline_stages == 1 or job.virtual_stages > 1:
        return None
    layers_P = np.array([len(chunk) for (chunk,) in job.stage_layers])
    first_ms, busy_P = _step_ms(workload, layers_P)
    best_ms, best_P = first_ms, layers_P
    while best_P[busy_P.argmax()] > 1:
        moved_P = best_P.copy()
        moved_P[busy_P.argmax()] -= 1
        moved_P[busy_P.argmin()] += 1
        ms, busy_P = _step_ms(workload, moved_P)
        if ms >= best_ms:
            break
        best_ms, best_P = ms, moved_P
    if first_ms / best_ms < LEAST_SPEEDUP:
        return None
    return EvenStages(layers=tuple(best_P.tolist()), speedup=first_ms / best_ms)


def _step_ms(workload: Workload, layers_P: np.ndarray) -> tuple[float, np.ndarray]:
    """Time of all steps, and of each stage's work in them, with so many layers per stage."""
    edges = [0, *np.cumsum(layers_P).tolist()]
    stages = tuple((tuple(range(*ends)),) for ends in itertools.pairwise(edges))
    job = replace(workload.job, stage_layers=stages)
    expected = [step.plan.expectation for step in replace(workload, job=job).planned_steps()]
    busy_P = sum(each.times_2RPVM.sum(axis=(0, 1, 3, 4)) for each in expected)
    return sum(each.makespan_ms for each in expected), np.asarray(busy_P)
