# SPDX-License-Identifier: Apache-2.0
"""The steps that lost most time against their plan, and where in them it was lost.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, 2 forward
and backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.report.comparison import settled
from sparsebalance_megatron.telemetry.rank_log import RankLogs
from sparsebalance_megatron.telemetry.step_record import MicroBatchTimes, Step

MOST = 5


class WorstStep(NamedTuple):
    """One step in words; empty where it is not known."""

    iteration: str
    lost_ms: str
    rank: str
    host: str
    micro_batch: str
    tokens: str
    predicted_ms: str
    measured_ms: str
    ratio: str


HEADINGS = WorstStep(
    "iteration",
    "lost, ms",
    "rank, stage",
    "host",
    "micro-batch",
    "tokens",
    "predicted, ms",
    "measured, ms",
    "ratio",
)


def worst_iterations(steps: Sequence[Step]) -> tuple[int, ...]:
    """Iterations after the warm-up whose busiest rank exceeded its prediction most, worst first.

    Predicted times are relative where no cost table was given: they are scaled to the median step.
    """
    known = {
        step.iteration: (max(step.measured_rank_ms), max(step.predicted_rank_ms))
        for step in settled(steps)
        if step.measured_rank_ms and step.predicted_rank_ms and max(step.predicted_rank_ms) > 0.0
    }
    if not known:
        return ()
    scale = float(np.median([measured / predicted for measured, predicted in known.values()]))
    lost_ms = {each: measured - scale * predicted for each, (measured, predicted) in known.items()}
    worst = sorted(lost_ms, key=lambda iteration: (-lost_ms[iteration], iteration))[:MOST]
    return tuple(iteration for iteration in worst if lost_ms[iteration] > 0.0)


def worst_rows(
    iterations: Sequence[int], times: dict[int, MicroBatchTimes], ranks: RankLogs
) -> list[WorstStep]:
    """The micro-batch of every step that exceeded its prediction most, forward and backward."""
    return [
        row
        for iteration in iterations
        if iteration in times
        for row in (_row(iteration, times[iteration], ranks),)
        if row is not None
    ]


def _row(iteration: int, times: MicroBatchTimes, ranks: RankLogs) -> WorstStep | None:
    if times.predicted_2RPVM is None or not np.isfinite(times.measured_2RPVM).all():
        return None
    measured_RPM = times.measured_2RPVM.sum(axis=(0, 3))
    predicted_RPM = times.predicted_2RPVM.sum(axis=(0, 3))
    scale = float(measured_RPM.sum() / predicted_RPM.sum()) if predicted_RPM.sum() > 0.0 else 1.0
    excess_RPM = measured_RPM - scale * predicted_RPM
    rank, stage, position = (
        int(i) for i in np.unravel_index(excess_RPM.argmax(), excess_RPM.shape)
    )
    measured_ms, predicted_ms = (
        float(each[rank, stage, position]) for each in (measured_RPM, predicted_RPM)
    )
    header = ranks.headers.get((rank, stage))
    step = ranks.steps.get(iteration, {}).get((rank, stage))
    held = [each for each in step.micro_batches if each.position == position] if step else []
    return WorstStep(
        iteration=str(iteration),
        lost_ms=f"{excess_RPM.max():,.0f}",
        rank=f"{rank}, {stage}",
        host=header.host if header else "",
        micro_batch=str(position),
        tokens=f"{held[0].tokens:,}" if held else "",
        predicted_ms=f"{predicted_ms:,.4g}",
        measured_ms=f"{measured_ms:,.4g}",
        ratio=f"{measured_ms / (scale * predicted_ms):.2f}" if predicted_ms > 0.0 else "",
    )
