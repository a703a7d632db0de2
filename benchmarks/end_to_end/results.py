# SPDX-License-Identifier: Apache-2.0
"""Reads what a run of paired steps left behind: the step log and every process's step times.

Shape legend: D data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from end_to_end.launch import BenchmarkError
from end_to_end.variants import StepOrder, Variant
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import megatron_order
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One measured step. Times in ms.

    ``step_ms``: of the slowest process, from the common beginning to the end of the optimizer;
    where one process plays several ranks in turn, with the slowest rank's computation only.
    ``balanced_ms``: the same step with its work spread evenly, see :func:`balanced_ms`.
    ``busy_ms``: computation per rank and stage, flat. ``heaviest_over_mean``: of the computation of
    a rank's micro-batch over all stages. ``coverage`` is executed, ``base_coverage`` what base
    budgets had given with the same scores, ``work_ratio`` the planner's; None for dense attention,
    which scores nothing. ``peak_megabytes``: most resident memory of every process.
    """

    step_ms: float
    balanced_ms: float
    busy_ms: tuple[float, ...]
    heaviest_over_mean: float
    coverage: float | None
    base_coverage: float | None
    work_ratio: float | None
    plan_ms: float
    plan_wait_ms: float
    tokens: int
    lm_loss: float
    peak_megabytes: tuple[float | None, ...] = ()


def read_steps(
    directory: Path,
    order: StepOrder,
    variants: Sequence[Variant],
    *,
    warm_up: int,
    ranks_in_turn: int,
) -> list[dict[str, StepResult]]:
    """Per global batch after ``warm_up``, the result of every variant by name; of variants with
    windows, of whole ones.

    Of training that was cut off, the batches that every variant has trained.

    Raises:
        BenchmarkError: if no batch is complete, a step was not measured in full, or the variants of
            a batch, or of a window, differ in their tokens.
    """
    window = max(variant.window for variant in variants)
    if warm_up % window:
        raise BenchmarkError(f"--warm-up {warm_up}: no multiple of the window's {window} steps")
    records = [record for record in _lines(directory / "steps.jsonl") if record["type"] == "step"]
    times = [_lines(path) for path in sorted(directory.glob("rank*.jsonl"))]
    steps = min(len(found) for found in (records, *times)) if times else 0
    batches_trained = min(order.batches, steps // order.variants)
    order = replace(order, batches=batches_trained // window * window)
    if order.batches <= warm_up:
        raise BenchmarkError(
            f"{directory}: {len(records)} steps in steps.jsonl and "
            f"{[len(found) for found in times]} in rank*.jsonl are no batch of {order.variants} "
            f"steps after {warm_up} of warm-up"
        )
    found: dict[tuple[int, int], StepResult] = {}
    for step in range(warm_up * order.variants, order.steps):
        slowest_ms = max(found[step]["ms"] for found in times)
        result = replace(
            _result(records[step], slowest_ms, ranks_in_turn),
            peak_megabytes=tuple(each[step]["peak_megabytes"] for each in times),
        )
        if not np.isfinite([result.balanced_ms, result.lm_loss]).all():
            raise BenchmarkError(f"{directory}: step {step} lacks a time or has no finite loss")
        found[order.batch(step), order.variant(step)] = result
    batches = [
        {variant.name: found[batch, place] for place, variant in enumerate(variants)}
        for batch in range(warm_up, order.batches)
    ]
    for first in range(0, len(batches), window):
        own = batches[first : first + window]
        if len({sum(batch[each.name].tokens for batch in own) for each in variants}) != 1:
            number = first + warm_up
            raise BenchmarkError(f"{directory}: batch {number} differs in tokens between variants")
    return batches


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        raise BenchmarkError(f"{path}: not there; see train.log beside it")
    # Training that was cut off may have left half a line.
    complete, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    return [json.loads(line) for line in complete.splitlines()]


def _result(record: dict[str, Any], slowest_ms: float, ranks_in_turn: int) -> StepResult:
    forward, backward = (
        _by_rank(times_DPVM, ranks_in_turn)
        for times_DPVM in np.array(record["measured"]["times_2RPVM"], dtype=np.float64)
    )
    busy_DP = (forward + backward).sum(axis=(2, 3))
    busy_DM = (forward + backward).sum(axis=(1, 2))
    step_ms = slowest_ms
    if ranks_in_turn > 1:
        step_ms += float(busy_DP.max() - busy_DP.sum())
    figures = record["figures"]
    dense = figures["coverage"] is None
    return StepResult(
        step_ms=step_ms,
        balanced_ms=balanced_ms(step_ms, forward, backward),
        busy_ms=tuple(busy_DP.ravel().tolist()),
        heaviest_over_mean=float(busy_DM.max() / busy_DM.mean()),
        coverage=figures["coverage"],
        base_coverage=figures["coverage_base"],
        work_ratio=None if dense else figures["work_ratio"],
        plan_ms=record["plan_ms"],
        plan_wait_ms=record["plan_wait_ms"],
        tokens=record["tokens"],
        lm_loss=float("nan") if record["lm_loss"] is None else record["lm_loss"],
    )


def _by_rank(times_DPVM: np.ndarray, ranks_in_turn: int) -> np.ndarray:
    """The micro-batches of one process dealt back to the ranks it played."""
    if ranks_in_turn == 1:
        return times_DPVM
    _, stages, virtual_stages, _ = times_DPVM.shape
    return np.moveaxis(times_DPVM.reshape(stages, virtual_stages, ranks_in_turn, -1), 2, 0)


def balanced_ms(step_ms: float, forward_DPVM: np.ndarray, backward_DPVM: np.ndarray) -> float:
    """The step with every micro-batch at its stage's mean forward and backward.

        step - makespan(measured times) + makespan(mean times)

    The first difference is what all variants share: gradient reduction, optimizer, communication.
    Without a pipeline the makespan is the busiest rank's computation, so the result is the step
    less what that rank computes beyond the mean over ranks.
    """
    measured_ms, mean_ms = (
        float(makespans_ms(_alone(np.stack(times))).max())
        for times in (
            (forward_DPVM, backward_DPVM),
            (_at_mean(forward_DPVM), _at_mean(backward_DPVM)),
        )
    )
    return step_ms - measured_ms + mean_ms


def _alone(times_2DPVM: np.ndarray) -> OperationTimes:
    _, ranks, _, _, positions = times_2DPVM.shape
    alone_DM = np.ones((ranks, positions), dtype=np.int64)
    return OperationTimes.of_micro_batches(times_2DPVM, alone_DM, megatron_order)


def _at_mean(times_DPVM: np.ndarray) -> np.ndarray:
    mean_PV = times_DPVM.mean(axis=(0, 3))
    return np.broadcast_to(mean_PV[None, :, :, None], times_DPVM.shape)
