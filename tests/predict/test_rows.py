# SPDX-License-Identifier: Apache-2.0
"""Variants of the same batches: comparable numbers, nothing lost."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import numpy as np
import pytest

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.predict.outcome import predict_rows, unhideable_steps
from sparsebalance_megatron.predict.rows import BASELINE, OURS, ROWS, best_row, rows_of
from sparsebalance_megatron.predict.scenario import SETUPS


@pytest.fixture(scope="module")
def outcomes():
    ticks = count()
    return predict_rows(small("paper-main", "longalign"), ROWS, lambda: next(ticks) * 1e-3)


def small(setup, data, steps=8):
    return SETUPS[setup].workload(
        data, steps=steps, seed=1, config=SparseBalanceConfig(dense_up_to="0")
    )


def test_ours_beats_the_papers_rows(outcomes):
    ours = np.array(outcomes[OURS].step_ms)
    for name in list(ROWS)[:6]:
        assert (ours <= np.array(outcomes[name].step_ms) * (1 + 1e-9)).all(), name
    assert outcomes[OURS].speedup > 1.3
    assert outcomes[OURS].bound_ratio < 1.15
    assert outcomes["ours, shortest"].bound_ratio < 1.05


def test_numbers_belong_together(outcomes):
    base = outcomes[BASELINE]
    assert (base.speedup, base.speedup_least, base.work_ratio) == (1.0, 1.0, pytest.approx(1.0))
    assert base.coverage_min_drop == 0.0
    for outcome in outcomes.values():
        assert outcome.bound_ratio >= 1.0
        assert outcome.coverage_min_drop <= 0.1 + 1e-9
        assert outcome.plan_ms == pytest.approx(1.0)
        assert outcome.speedup == pytest.approx(sum(base.step_ms) / sum(outcome.step_ms))


def test_curves_stay_the_workloads(outcomes):
    workload = small("paper-main", "longalign")
    before = workload.coverage.mean_LUK.copy()
    base = predict_rows(workload, {"base": ROWS["ours"]}, lambda: 0.0)["base"]
    assert base == replace(outcomes["ours"], speedup=1.0, speedup_least=1.0, plan_ms=0.0)
    np.testing.assert_array_equal(workload.coverage.mean_LUK, before)


def test_base_coverage_is_not_undercut(outcomes):
    untuned = outcomes[BASELINE].coverage_mean
    assert outcomes["ours"].coverage_mean >= untuned


def test_rows_of_segments_follow_what_the_workload_allows():
    workload = small("paper-main", "chatqa2", steps=1)

    def rows(**changes):
        changed = replace(workload, plan_settings=replace(workload.plan_settings, **changes))
        found = rows_of(changed)
        assert best_row(changed) in found.values()
        return [name for name in found if "segments" in name or name.endswith("-cp")]

    assert rows() == []
    assert rows(max_segments=8) == ["ours-segments"]
    both = rows(max_segments=8, max_context_parallel=2)
    assert both == ["ours-dynamic-cp", "ours-segments", "ours-segments-cp"]


def test_unhideable_steps_are_counted():
    workload = small("paper-main", "chatqa2-tail")
    assert 0 < unhideable_steps(workload) <= 8
