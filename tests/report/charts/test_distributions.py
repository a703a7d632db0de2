# SPDX-License-Identifier: Apache-2.0
"""Lengths and budgets, counted by hand."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from report.sample_run import BASE_BUDGET, BLOCK_SIZE, SampleRun

from sparsebalance_megatron.report.charts.distributions import (
    NO_RANKS,
    blocks_in,
    budget_ratios,
    budgets_picture,
    lengths_picture,
)
from sparsebalance_megatron.telemetry.rank_log import RankLogs, read_rank_logs
from sparsebalance_megatron.telemetry.rank_record import RankHeader, RankMicroBatch, RankStep

pytest.importorskip("matplotlib")
CONFIG = {"block_size": BLOCK_SIZE, "base_budget": BASE_BUDGET}


def logs(stages: int, lengths_tokens: tuple[int, ...], budgets_LS: np.ndarray) -> RankLogs:
    """One step of one rank; stage p has layer p."""
    headers = {
        (0, p): RankHeader(world_rank=p, place=(0, p), tensor_parallel_rank=0, layers=(p,))
        for p in range(stages)
    }
    steps = {
        (0, p): RankStep(
            start_unix_s=None,
            micro_batches=(
                RankMicroBatch(
                    position=0,
                    lengths_tokens=lengths_tokens,
                    budgets_LS=budgets_LS[p : p + 1],
                    coverage_S=(),
                ),
            ),
            spans=(),
            unmeasured=0,
        )
        for p in range(stages)
    }
    return RankLogs(headers=headers, steps={1: steps})


def test_ratios_by_layer_and_length() -> None:
    """10, 25 and 30 tokens are 1, 3 and 3 blocks of 10; 80 are 8; the base budget is 2."""
    budgets_LS = np.array([[9, 1, 3, 4], [1, 2, 2, 1]])
    ratio_LU, buckets = budget_ratios(logs(2, (10, 25, 30, 80), budgets_LS), 10, 2)
    assert buckets == (0, 1, 3)
    # Beyond a sample's own blocks a budget changes nothing.
    np.testing.assert_allclose(ratio_LU, [[1.0, (0.5 + 1.5) / 2, 2.0], [1.0, 1.0, 0.5]])


def test_names_of_buckets() -> None:
    assert [blocks_in(bucket) for bucket in (0, 1, 4)] == ["1", "2-3", "16-31"]
    assert blocks_in(4, 20) == "16-20"
    assert blocks_in(4, 16) == "16"


def test_every_sample_is_counted_once_whatever_the_stages(tmp_path: Path) -> None:
    run = SampleRun(ranks=2, stages=2, micro_batches=2, layers=4, steps=3)
    ranks = read_rank_logs(run.write(tmp_path), {1, 2, 3})
    picture = lengths_picture(ranks, CONFIG, "all 3 steps")
    assert "12 samples of all 3 steps." in picture.caption
    assert f"{BLOCK_SIZE * BASE_BUDGET:,} tokens, the base budget covers" in picture.caption
    lengths = [length for i in range(3) for m in run.plan(i).slots for length in m.lengths_tokens]
    assert f"longest {max(lengths):,}" in picture.alt
    heat = budgets_picture(ranks, CONFIG, "all 3 steps")
    assert heat.svg is not None and "4 layers" in heat.alt


def test_one_length_and_one_layer_can_be_drawn() -> None:
    ranks = logs(1, (BLOCK_SIZE,), np.array([[1]]))
    assert lengths_picture(ranks, CONFIG, "1 step").svg is not None
    assert budgets_picture(ranks, CONFIG, "1 step").svg is not None


def test_what_is_missing_is_said() -> None:
    assert lengths_picture(RankLogs(), CONFIG, "").caption == NO_RANKS
    assert budgets_picture(RankLogs(), CONFIG, "").caption == NO_RANKS
    ranks = logs(1, (BLOCK_SIZE,), np.array([[1]]))
    assert "log's header" in budgets_picture(ranks, {}, "").caption
    assert lengths_picture(ranks, {}, "").svg is not None
    empty = logs(1, (BLOCK_SIZE,), np.zeros((0, 1)))
    assert lengths_picture(empty, CONFIG, "").svg is not None
