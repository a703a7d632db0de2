# SPDX-License-Identifier: Apache-2.0
"""Tables of a report as rows of text; a cell is empty where the logs do not say.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, L layers,
S samples, 2 forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.log.reader import RankLogs
from sparsebalance_megatron.log.records import (
    SIDES,
    Place,
    RankMicroBatch,
    RankStep,
    StepRecord,
)
from sparsebalance_megatron.view.report.comparison import settled

_MOST_LENGTHS_SHOWN = 8
_MOST_WORST_STEPS = 5


class Table(NamedTuple):
    """Text in rows."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


MICRO_BATCH_HEADINGS = (
    *("rank", "micro-batch", "lengths, tokens", "budgets, blocks", "coverage"),
    *("predicted, ms", "measured, ms"),
)
WORST_HEADINGS = (
    *("iteration", "lost, ms", "rank, stage", "host", "micro-batch", "tokens"),
    *("predicted, ms", "measured, ms", "ratio"),
)


def micro_batch_table(
    record: StepRecord, ranks: Mapping[Place, RankStep], shown: Collection[int]
) -> Table:
    """Every micro-batch of a step on the data-parallel ranks in ``shown``, over all stages.

    Budgets are the mean over layers, one per sample; coverage is the mean over samples and stages.
    """
    held: dict[tuple[int, int], list[RankMicroBatch]] = {}
    for (rank, _), step in sorted(ranks.items()):
        for micro_batch in step.micro_batches:
            held.setdefault((rank, micro_batch.position), []).append(micro_batch)
    times_RM = [record.times_2RPVM(side).sum(axis=(0, 2, 3)) for side in SIDES]
    rows = [
        (
            str(rank),
            str(position),
            *_contents(held.get((rank, position), [])),
            *(
                f"{ms:,.1f}" if np.isfinite(ms) else ""
                for ms in (t[rank, position] for t in times_RM)
            ),
        )
        for rank, position in np.ndindex(times_RM[0].shape)
        if rank in shown and not (record.segments and position >= len(record.segments[rank]))
    ]
    return Table(MICRO_BATCH_HEADINGS, rows)


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


def worst_steps(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """Steps after the warm-up whose busiest rank exceeded its prediction most, worst first.

    Without a cost table predicted times are relative, so they are scaled to the median step.
    """
    known = [
        (step, max(step.measured_rank_ms), max(step.predicted_rank_ms))
        for step in settled(steps)
        if step.measured_rank_ms and step.predicted_rank_ms and max(step.predicted_rank_ms) > 0.0
    ]
    if not known:
        return []
    scale = float(np.median([measured_ms / predicted_ms for _, measured_ms, predicted_ms in known]))
    lost = [(measured_ms - scale * predicted_ms, step) for step, measured_ms, predicted_ms in known]
    lost.sort(key=lambda each: -each[0])
    return [step for lost_ms, step in lost[:_MOST_WORST_STEPS] if lost_ms > 0.0]


def worst_table(steps: Iterable[StepRecord], ranks: RankLogs) -> Table:
    """The micro-batch of every step that exceeded its prediction most, on one stage.

    The step that lost most comes first.
    """
    found = [_worst_row(step, ranks) for step in steps if step.complete]
    rows = [row for _, row in sorted(found, key=lambda each: -each[0])]
    return Table(WORST_HEADINGS, rows)


def _worst_row(record: StepRecord, ranks: RankLogs) -> tuple[float, tuple[str, ...]]:
    """Of the micro-batch: ms above its prediction, and the cells of its row."""
    predicted_RPM, measured_RPM = (record.times_2RPVM(side).sum(axis=(0, 3)) for side in SIDES)
    scale = float(measured_RPM.sum() / predicted_RPM.sum()) if predicted_RPM.sum() > 0.0 else 1.0
    excess_RPM = measured_RPM - scale * predicted_RPM
    place = np.unravel_index(excess_RPM.argmax(), excess_RPM.shape)
    rank, stage, position = map(int, place)
    header = ranks.headers.get((rank, stage))
    step = ranks.steps.get(record.iteration, {}).get((rank, stage))
    held = [each for each in step.micro_batches if each.position == position] if step else []
    expected_ms = scale * predicted_RPM[place]
    row = (
        str(record.iteration),
        f"{excess_RPM[place]:,.0f}",
        f"{rank}, {stage}",
        header.host if header else "",
        str(position),
        f"{held[0].tokens:,}" if held else "",
        f"{predicted_RPM[place]:,.4g}",
        f"{measured_RPM[place]:,.4g}",
        f"{measured_RPM[place] / expected_ms:.2f}" if expected_ms > 0.0 else "",
    )
    return float(excess_RPM[place]), row
