# SPDX-License-Identifier: Apache-2.0
"""Micro-batches of a step in numbers."""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.report.step_table import MicroBatchRow, micro_batch_rows
from sparsebalance_megatron.telemetry.rank_record import RankMicroBatch, RankStep
from sparsebalance_megatron.telemetry.step_record import MicroBatchTimes

TIMES = MicroBatchTimes(
    measured_2RPVM=np.array(
        [[[[[1.0, 1.0]], [[1.0, 1.0]]]], [[[[2.0, 2.0]], [[2.0, np.nan]]]]],
    ),
    predicted_2RPVM=np.full((2, 1, 2, 1, 2), 1000.0),
)


def stage(budgets_LS: list[list[float]], coverage: float | None) -> RankStep:
    micro_batch = RankMicroBatch(
        position=0,
        lengths_tokens=(4096, 100),
        budgets_LS=np.array(budgets_LS),
        coverage_S=(coverage, 1.0),
    )
    return RankStep(start_unix_s=None, micro_batches=(micro_batch,), spans=(), unmeasured=0)


def test_stages_are_put_together() -> None:
    ranks = {(0, 0): stage([[2.0, 1.0], [4.0, 1.0]], 0.5), (0, 1): stage([[6.0, 1.0]], None)}
    first, second = micro_batch_rows(TIMES, ranks, {0})
    assert first == MicroBatchRow(
        rank="0",
        position="0",
        lengths="4,096 · 100",
        budgets="4.0 · 1.0",
        coverage="0.833",
        predicted_ms="4,000.0",
        measured_ms="6.0",
    )
    assert second == MicroBatchRow("0", "1", "", "", "", "4,000.0", "")


def test_other_ranks_are_left_out() -> None:
    assert micro_batch_rows(TIMES, {}, {1}) == []
    assert micro_batch_rows(None, {}, {0}) == []


def test_micro_batches_that_only_a_rank_knows() -> None:
    (row,) = micro_batch_rows(None, {(3, 0): stage([[2.0, 1.0]], 0.5)}, {3})
    assert (row.rank, row.measured_ms) == ("3", "")
