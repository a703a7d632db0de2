# SPDX-License-Identifier: Apache-2.0
"""What a trace shows beside computing: waiting, which slice was predicted by which, slow devices.

Shape legend: R data-parallel ranks, P pipeline stages.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from sparsebalance_megatron.log.records import Place
from sparsebalance_megatron.log.steps import MicroBatchTimes
from sparsebalance_megatron.plan.metrics import stage_busy_ms
from sparsebalance_megatron.view.report.timeline import Bar, Timeline


def waiting_ms(timeline: Timeline) -> Iterator[tuple[Place, float, float]]:
    """Place, start and end of all time until the step's end in which a stage computes nothing."""
    bars: dict[Place, list[Bar]] = {}
    for bar in timeline.bars:
        bars.setdefault(bar.place, []).append(bar)
    end_ms = timeline.makespan_ms
    for place, mine in sorted(bars.items()):
        free_ms = 0.0
        for bar in sorted(mine, key=lambda bar: (bar.start_ms, bar.end_ms)):
            if bar.start_ms > free_ms:
                yield place, free_ms, bar.start_ms
            free_ms = max(free_ms, bar.end_ms)
        if end_ms > free_ms:
            yield place, free_ms, end_ms


def same_work(predicted: Timeline | None, measured: Timeline | None) -> Iterator[tuple[Bar, Bar]]:
    """Every forward and backward that both have, as predicted and as measured."""
    if predicted is None or measured is None:
        return
    expected = {_work(bar): bar for bar in predicted.bars}
    for bar in measured.bars:
        if _work(bar) in expected:
            yield expected[_work(bar)], bar


def _work(bar: Bar) -> tuple[Place, str, int, int]:
    return bar.place, bar.direction, bar.chunk, bar.position


def device_ratios(times: MicroBatchTimes | None) -> Iterator[tuple[Place, float]]:
    """Measured over predicted computing time of every stage of every rank, where both are known."""
    if times is None or times.predicted_2RPVM is None:
        return
    predicted_RP, measured_RP = map(stage_busy_ms, (times.predicted_2RPVM, times.measured_2RPVM))
    for (rank, stage), measured in np.ndenumerate(measured_RP):
        predicted = predicted_RP[rank, stage]
        if np.isfinite(measured) and predicted > 0.0:
            yield (rank, stage), float(measured / predicted)
