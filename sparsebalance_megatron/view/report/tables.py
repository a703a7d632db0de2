# SPDX-License-Identifier: Apache-2.0
"""Tables of a report as rows of text; a cell is empty where the logs do not say.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, L layers,
S samples, 2 forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.log.rank_log import RankLogs
from sparsebalance_megatron.log.records import Place, RankMicroBatch, RankStep
from sparsebalance_megatron.log.steps import SIDES, MicroBatchTimes, Step
from sparsebalance_megatron.view.report.comparison import settled

_MOST_LENGTHS_SHOWN = 8
_MOST_WORST_STEPS = 5


class Table(NamedTuple):
    """Text in rows."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


class MicroBatchRow(NamedTuple):
    """One micro-batch: its samples, and times in ms over all stages, forward and backward."""

    rank: str
    position: str
    lengths: str
    budgets: str
    coverage: str
    predicted_ms: str
    measured_ms: str


MICRO_BATCH_HEADINGS = MicroBatchRow(
    *("rank", "micro-batch", "lengths, tokens", "budgets, blocks", "coverage"),
    *("predicted, ms", "measured, ms"),
)


def micro_batch_rows(
    times: MicroBatchTimes | None, ranks: Mapping[Place, RankStep], shown: Collection[int]
) -> list[MicroBatchRow]:
    """Every micro-batch of a step on the data-parallel ranks in ``shown``.

    Budgets are the mean over layers, one per sample; coverage is the mean over samples and stages.
    """
    held: dict[tuple[int, int], list[RankMicroBatch]] = {}
    for (rank, _), step in sorted(ranks.items()):
        for micro_batch in step.micro_batches:
            held.setdefault((rank, micro_batch.position), []).append(micro_batch)
    keys = set(held)
    if times is not None:
        data_parallel, _, _, micro_batches = times.shape
        keys |= {(rank, m) for rank in range(data_parallel) for m in range(micro_batches)}
    return [
        MicroBatchRow(
            str(rank),
            str(position),
            *_contents(held.get((rank, position), [])),
            *(_side_ms(times, side, rank, position) for side in SIDES),
        )
        for rank, position in sorted(keys)
        if rank in shown
    ]


def _contents(stages: list[RankMicroBatch]) -> tuple[str, str, str]:
    if not stages:
        return "", "", ""
    budgets_LS = np.concatenate([stage.budgets_LS for stage in stages])
    coverage = [value for stage in stages for value in stage.coverage_S if value is not None]
    return (
        _listed([f"{length:,}" for length in stages[0].lengths_tokens]),
        _listed([f"{budget:.1f}" for budget in budgets_LS.mean(axis=0)] if len(budgets_LS) else []),
        f"{np.mean(coverage):.3f}" if coverage else "",
    )


def _listed(values: list[str]) -> str:
    more = len(values) - _MOST_LENGTHS_SHOWN
    return " · ".join(values[:_MOST_LENGTHS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _side_ms(times: MicroBatchTimes | None, side: str, rank: int, position: int) -> str:
    times_2RPVM = None if times is None else times.side(side)
    if times_2RPVM is None or rank >= times_2RPVM.shape[1] or position >= times_2RPVM.shape[4]:
        return ""
    ms = float(times_2RPVM[:, rank, :, :, position].sum())
    return f"{ms:,.1f}" if np.isfinite(ms) else ""


class WorstStep(NamedTuple):
    """The micro-batch of a step that exceeded its prediction most, on one stage."""

    iteration: str
    lost_ms: str
    rank: str
    host: str
    micro_batch: str
    tokens: str
    predicted_ms: str
    measured_ms: str
    ratio: str


WORST_HEADINGS = WorstStep(
    *("iteration", "lost, ms", "rank, stage", "host", "micro-batch", "tokens"),
    *("predicted, ms", "measured, ms", "ratio"),
)


def worst_iterations(steps: Sequence[Step]) -> tuple[int, ...]:
    """Iterations after the warm-up whose busiest rank exceeded its prediction most, worst first.

    Without a cost table predicted times are relative, so they are scaled to the median step.
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
    worst = sorted(lost_ms, key=lambda iteration: (-lost_ms[iteration], iteration))
    return tuple(each for each in worst[:_MOST_WORST_STEPS] if lost_ms[each] > 0.0)


def worst_rows(
    iterations: Sequence[int], times: Mapping[int, MicroBatchTimes], ranks: RankLogs
) -> list[WorstStep]:
    """The worst micro-batch of every step, the one that lost most first."""
    found = [_worst_row(each, times[each], ranks) for each in iterations if each in times]
    known = [each for each in found if each is not None]
    return [row for _, row in sorted(known, key=lambda each: -each[0])]


def _worst_row(
    iteration: int, times: MicroBatchTimes, ranks: RankLogs
) -> tuple[float, WorstStep] | None:
    if times.predicted_2RPVM is None or not np.isfinite(times.measured_2RPVM).all():
        return None
    measured_RPM = times.measured_2RPVM.sum(axis=(0, 3))
    predicted_RPM = times.predicted_2RPVM.sum(axis=(0, 3))
    scale = float(measured_RPM.sum() / predicted_RPM.sum()) if predicted_RPM.sum() > 0.0 else 1.0
    excess_RPM = measured_RPM - scale * predicted_RPM
    rank, stage, position = map(int, np.unravel_index(excess_RPM.argmax(), excess_RPM.shape))
    measured_ms = float(measured_RPM[rank, stage, position])
    predicted_ms = float(predicted_RPM[rank, stage, position])
    header = ranks.headers.get((rank, stage))
    step = ranks.steps.get(iteration, {}).get((rank, stage))
    held = [each for each in step.micro_batches if each.position == position] if step else []
    row = WorstStep(
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
    return float(excess_RPM.max()), row
