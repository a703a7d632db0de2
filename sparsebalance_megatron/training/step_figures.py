# SPDX-License-Identifier: Apache-2.0
"""The figures of a step that Megatron's log line shows, and how they get there.

Shape legend: R data-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from sparsebalance_megatron.plan.measurement import StepMeasurement
from sparsebalance_megatron.plan.metrics import imbalance, rank_busy_ms
from sparsebalance_megatron.plan.step_plan import Expectation
from sparsebalance_megatron.telemetry.scalars import PREFIX


def step_figures(
    expectation: Expectation, measured: StepMeasurement, rare_counts: Mapping[str, int]
) -> dict[str, float]:
    """Name -> value, alike on all ranks.

    Args:
        rare_counts: name -> tokens that were padded or lost, or pairs without coverage; shown
            where they are not zero.
    """
    busy_R = rank_busy_ms(measured.times_2RPVM)
    predicted_R = rank_busy_ms(expectation.times_2RPVM)
    values = {
        "imbalance": imbalance(busy_R),
        "predicted-to-measured": predicted_R.max() / busy_R.max(),
        "coverage": measured.coverage.executed_mean,
        "tuned-samples": expectation.samples_cut + expectation.samples_raised,
    }
    values |= {name: count for name, count in rare_counts.items() if count}
    return {f"{PREFIX}/{name}": float(value) for name, value in values.items()}


def extend_reports(
    reports: Iterable[dict[str, Tensor]], figures: Mapping[str, float], device: torch.device
) -> None:
    """Add figures to what Megatron logs.

    Megatron reads the micro-batches' reports only after the step, so those of the last stage can
    still take what is known at its end. Of a single value it takes the mean over micro-batches and
    asks no other rank, where all have the same.
    """
    reports = list(reports)
    if not reports:
        return
    values = torch.tensor(list(figures.values()), dtype=torch.float, device=device).unbind()
    for report in reports:
        report.update(zip(figures, values, strict=True))
