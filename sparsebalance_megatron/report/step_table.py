# SPDX-License-Identifier: Apache-2.0
"""The micro-batches of one step as rows of text.

Shape legend: R data-parallel ranks, P pipeline stages, V virtual stages, M micro-batches, L layers,
S samples, 2 forward and backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.telemetry.rank_record import Place, RankMicroBatch, RankStep
from sparsebalance_megatron.telemetry.step_record import SIDES, MicroBatchTimes

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
    times: MicroBatchTimes | None, ranks: Mapping[Place, RankStep], shown: Collection[int]
) -> list[MicroBatchRow]:
    """Every micro-batch of the data-parallel ranks in ``shown``.

    Budgets are the mean over the layers of all stages, one per sample; coverage is the mean over
    samples and stages; times are the sum over stages of forward and backward.
    """
    held = _by_micro_batch(ranks)
    keys = set(held)
    if times is not None:
        data_parallel, _, _, micro_batches = times.shape
        keys |= {(rank, m) for rank in range(data_parallel) for m in range(micro_batches)}
    return [
        MicroBatchRow(
            str(rank),
            str(position),
            *_contents(held.get((rank, position), [])),
            *(_ms(times, side, rank, position) for side in SIDES),
        )
        for rank, position in sorted(keys)
        if rank in shown
    ]


def _by_micro_batch(
    ranks: Mapping[Place, RankStep],
) -> dict[tuple[int, int], list[RankMicroBatch]]:
    """(rank, position) to the micro-batch as every stage logged it."""
    found: dict[tuple[int, int], list[RankMicroBatch]] = {}
    for (rank, _), step in sorted(ranks.items()):
        for micro_batch in step.micro_batches:
            found.setdefault((rank, micro_batch.position), []).append(micro_batch)
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


def _ms(times: MicroBatchTimes | None, side: str, rank: int, position: int) -> str:
    times_2RPVM = None if times is None else times.side(side)
    if times_2RPVM is None or rank >= times_2RPVM.shape[1] or position >= times_2RPVM.shape[4]:
        return ""
    ms = float(times_2RPVM[:, rank, :, :, position].sum())
    return f"{ms:,.1f}" if np.isfinite(ms) else ""
