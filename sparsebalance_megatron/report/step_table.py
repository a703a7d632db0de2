# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of one step as rows of text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.telemetry.rank_log_reader import Place, RankMicroBatch, RankStep
from sparsebalance_megatron.telemetry.step_times import StepTimes

_LENGTHS_SHOWN = 8


class MicroBatchRow(NamedTuple):
    """One micro-batch in words; empty where it is not known."""

    rank: str
    position: str
    lengths: str
    budgets: str
    coverage: str
    predicted_ms: str
    measured_ms: str


HEADINGS = MicroBatchRow(
    "rank",
    "micro-batch",
    "lengths, tokens",
    "budgets, blocks",
    "coverage",
    "predicted, ms",
    "measured, ms",
)


def micro_batch_rows(
    times: StepTimes | None, ranks: Mapping[Place, RankStep], shown: Collection[int]
) -> list[MicroBatchRow]:
    """Every micro-batch of the data-parallel ranks in ``shown``.

    Budgets are the mean over the layers of all stages, one per sample; coverage is the mean over
    samples and stages; times are the sum over stages of forward and backward.
    """
    held = _by_micro_batch(ranks)
    keys = set(held)
    if times is not None:
        data_parallel, _, _, micro_batches = times.shape
        keys |= {(d, m) for d in range(data_parallel) for m in range(micro_batches)}
    return [
        MicroBatchRow(
            str(d),
            str(m),
            *_contents(held.get((d, m), [])),
            *(_ms(times, side, d, m) for side in ("predicted", "measured")),
        )
        for d, m in sorted(keys)
        if d in shown
    ]


def _by_micro_batch(
    ranks: Mapping[Place, RankStep],
) -> dict[tuple[int, int], list[RankMicroBatch]]:
    """(rank, position) to the micro-batch as every stage logged it."""
    found: dict[tuple[int, int], list[RankMicroBatch]] = {}
    for (d, _), step in sorted(ranks.items()):
        for micro_batch in step.micro_batches:
            found.setdefault((d, micro_batch.position), []).append(micro_batch)
    return found


def _contents(stages: list[RankMicroBatch]) -> tuple[str, str, str]:
    if not stages:
        return "", "", ""
    budgets_LS = np.concatenate([stage.budgets_LS for stage in stages])
    coverage = [value for stage in stages for value in stage.coverage_S if value is not None]
    lengths = [f"{length:,}" for length in stages[0].lengths_tokens]
    budgets = [f"{budget:.1f}" for budget in budgets_LS.mean(axis=0)] if len(budgets_LS) else []
    return (
        _listed(lengths),
        _listed(budgets),
        f"{np.mean(coverage):.3f}" if coverage else "",
    )


def _listed(values: list[str]) -> str:
    more = len(values) - _LENGTHS_SHOWN
    return " · ".join(values[:_LENGTHS_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _ms(times: StepTimes | None, side: str, d: int, m: int) -> str:
    if times is None:
        return ""
    forward = getattr(times, f"{side}_forward_DPVM")
    backward = getattr(times, f"{side}_backward_DPVM")
    if forward is None or backward is None or d >= len(forward) or m >= forward.shape[3]:
        return ""
    ms = float((forward[d, :, :, m] + backward[d, :, :, m]).sum())
    return f"{ms:,.1f}" if np.isfinite(ms) else ""
