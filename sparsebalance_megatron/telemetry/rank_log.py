# SPDX-License-Identifier: Apache-2.0
"""A log per rank: what it was told to compute, when it did, and the coverage its samples got.

Shape legend: L layers of this rank, S samples of a micro-batch, R rows of observations.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.plan.measurement import Piece, RankPlace, StepTimes
from sparsebalance_megatron.plan.planned_step import PlannedStep
from sparsebalance_megatron.plan.step_plan import JobShape, MicroBatchPlan

_MS_DIGITS = 4
_COVERAGE_DIGITS = 5


def rank_log_path(directory: str | Path, world_rank: int) -> Path:
    """``DIR/ranks/rank-00000.jsonl``."""
    return Path(directory) / "ranks" / f"rank-{world_rank:05d}.jsonl"


def remove_surplus_rank_logs(directory: str | Path, world_size: int) -> None:
    """Delete what an earlier run with more ranks left in the directory."""
    for path in Path(directory).glob("ranks/rank-*.jsonl"):
        number = path.name.removeprefix("rank-").partition(".")[0]
        if number.isdigit() and int(number) >= world_size:
            path.unlink(missing_ok=True)


def rank_header(place: RankPlace, job: JobShape, host: str) -> dict[str, Any]:
    """The first line; ``layers`` are global and zero-based, one list per chunk."""
    return {
        "type": "rank",
        "world_rank": place.world_rank,
        "data_parallel_rank": place.data_parallel_rank,
        "pipeline_rank": place.pipeline_rank,
        "tensor_parallel_rank": place.tensor_parallel_rank,
        "layers": [list(chunk) for chunk in job.stage_layers[place.pipeline_rank]],
        "host": host,
    }


def rank_record(
    *,
    iteration: int,
    planned: PlannedStep,
    place: RankPlace,
    job: JobShape,
    times: StepTimes,
    pieces: Sequence[Piece],
    executed_and_grown_R2: np.ndarray,
) -> dict[str, Any]:
    """One step of this rank. Times in ms; budgets are as planned, coverage as executed.

    Args:
        pieces, executed_and_grown_R2: see :class:`.observed.ObservedCoverage`.
    """
    layers = [layer for chunk in job.stage_layers[place.pipeline_rank] for layer in chunk]
    observed: dict[int, list[np.ndarray]] = {}
    first = 0
    for piece in pieces:
        rows = executed_and_grown_R2[first : first + piece.samples]
        observed.setdefault(piece.position, []).append(rows)
        first += piece.samples
    micro_batches = planned.plan.for_rank(place.data_parallel_rank).micro_batches
    return {
        "type": "step",
        "iteration": iteration,
        "schedule_start_unix_s": times.start_unix_s,
        "schedule_ms": times.schedule_ms,
        "micro_batches": [
            {
                "position": position,
                **_micro_batch(micro_batch, planned.samples, layers, observed.get(position)),
            }
            for position, micro_batch in enumerate(micro_batches)
        ],
        "spans": [
            (*span[:3], round(span.start_ms, _MS_DIGITS), round(span.end_ms, _MS_DIGITS))
            for span in times.spans
        ],
    }


def _micro_batch(
    plan: MicroBatchPlan,
    samples: np.ndarray,
    layers: list[int],
    observed: list[np.ndarray] | None,
) -> dict[str, Any]:
    """``observed``: [S, 2] of every layer; coverage is null where this rank has no layers."""
    coverage, guarded = None, 0
    if observed is not None:
        observed_LS2 = np.stack(observed)
        coverage = np.round(observed_LS2[..., 0].mean(axis=0), _COVERAGE_DIGITS).tolist()
        guarded = int(observed_LS2[..., 1].sum())
    return {
        "samples": samples[list(plan.samples)].tolist(),
        "lengths_tokens": list(plan.lengths_tokens),
        "budgets": plan.budgets_LS[layers].tolist(),
        "coverage": coverage,
        "guarded": guarded,
    }
