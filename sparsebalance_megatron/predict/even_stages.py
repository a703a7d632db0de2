# SPDX-License-Identifier: Apache-2.0
"""Layers per pipeline stage that make up for the embedding and the output head."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.predict.workload import Workload

LEAST_SPEEDUP = 1.01
"""Smaller gains are within the error of predictions and are not named."""
_STEPS = 4
"""Steps that are planned for a layout, at most."""
_MOST_MOVES = 8
"""Layers that move at most; each move plans all batches twice."""


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
            f"are predicted to be {self.speedup:.2f} times as fast; a dry run shows its memory"
        )


def even_stages(workload: Workload) -> EvenStages | None:
    """Move layers off the busiest stage or the last while the predicted steps get shorter.

    None where that gains less than :data:`LEAST_SPEEDUP`, without a pipeline, and with virtual
    stages.

    Raises:
        PlanError: a batch has no placement under the policy's cap.
    """
    workload = replace(workload, batches=workload.batches[:_STEPS])
    job, stages = workload.job, workload.job.pipeline_stages
    if stages == 1 or job.virtual_stages > 1:
        return None
    layers_P = np.array([len(chunk) for (chunk,) in job.stage_layers])
    first_ms, busy_P = _step_ms(workload, layers_P)
    best_ms, best_P = first_ms, layers_P
    for _ in range(_MOST_MOVES):
        moved = [_moved(best_P, source, busy_P) for source in {int(busy_P.argmax()), stages - 1}]
        tried = [(*_step_ms(workload, layers_P), layers_P) for layers_P in moved if layers_P.all()]
        ms, busy_P, layers_P = min(
            tried, key=lambda each: each[0], default=(best_ms, busy_P, best_P)
        )
        if ms >= best_ms:
            break
        best_ms, best_P = ms, layers_P
    if first_ms / best_ms < LEAST_SPEEDUP:
        return None
    return EvenStages(layers=tuple(best_P.tolist()), speedup=first_ms / best_ms)


def _moved(layers_P: np.ndarray, source: int, busy_P: np.ndarray) -> np.ndarray:
    """One layer less on a stage, one more on the stage of the others with the least work."""
    others_P = np.where(np.arange(len(busy_P)) == source, np.inf, busy_P)
    moved_P = layers_P.copy()
    moved_P[source] -= 1
    moved_P[others_P.argmin()] += 1
    return moved_P


def _step_ms(workload: Workload, layers_P: np.ndarray) -> tuple[float, np.ndarray]:
    """Time of all steps, and of each stage's work in them, with so many layers per stage."""
    edges = [0, *np.cumsum(layers_P).tolist()]
    stages = tuple((tuple(range(*ends)),) for ends in itertools.pairwise(edges))
    job = replace(workload.job, stage_layers=stages)
    expected = [step.plan.expectation for step in replace(workload, job=job).planned_steps()]
    busy_P = sum(each.times_2RPVM.sum(axis=(0, 1, 3, 4)) for each in expected)
    return sum(each.makespan_ms for each in expected), np.asarray(busy_P)
