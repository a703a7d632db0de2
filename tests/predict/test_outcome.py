# SPDX-License-Identifier: Apache-2.0
"""Outcomes: shares by hand, limits that must hold, the break-even, memory at most."""

from typing import Any

import numpy as np
import pytest
from predict.predict_cases import EXPERTS, LENGTHS, workload

from sparsebalance_megatron.predict.comparison import EXACT, ROWS, rows_of
from sparsebalance_megatron.predict.outcome import Outcome, memory_at_most, predict
from sparsebalance_megatron.predict.workload import prior_coverage, read_lengths, samples_of


def outcome(**changes: Any) -> Outcome:
    return predict(workload(**changes))


def test_shares_by_hand() -> None:
    found = outcome()
    within = sum(length for length in LENGTHS if length <= 128 * 8)
    assert found.dense_tokens_share == pytest.approx(within / sum(LENGTHS))
    assert found.tokens_per_second_per_gpu == pytest.approx(
        sum(LENGTHS) / (found.makespan_ms / 1e3) / 4
    )


def test_one_micro_batch_on_one_gpu_leaves_no_bubble() -> None:
    alone = {"ranks": 1, "micro_batches": 1, "cap_tokens": 2**20}
    assert outcome(**alone, stages=1).bubble_share == pytest.approx(0.0, abs=1e-9)
    piped = outcome(**alone, stages=4)
    assert piped.bubble_share >= 0.75 - 1e-9
    assert len(piped.stages) == len(piped.stages_at_most) == 4


def test_more_work_is_never_cheaper() -> None:
    found = [outcome(config={"base_budget": budget}) for budget in (2, 8, 32)]
    assert [each.makespan_ms for each in found] == sorted(each.makespan_ms for each in found)


def test_memory_at_most_holds_for_every_sample_and_depends_on_none() -> None:
    few = workload()
    many = workload(tuple(tuple(np.roll(LENGTHS, n).tolist()) for n in range(4)))
    assert memory_at_most(few) == memory_at_most(many)
    # A sample of 64 blocks, of which each rank holds 8.
    shared = workload(ranks=8, stages=1, cp_size=8, micro_batches=8, cap_tokens=1024)
    segments = workload(config={"max_segments": 4, "segment_tokens": 256})
    recomputed = [
        workload(many.batches, **flags)
        for flags in ({"recompute_attention": True}, {"recompute_all": True})
    ]
    for given in (many, *recomputed, shared, segments):
        for row in rows_of(given).values():
            found = predict(row.of(given))
            for held, most in zip(found.stages, found.stages_at_most, strict=True):
                assert held.total_bytes <= most.total_bytes


def test_no_lists_are_counted_where_every_document_is_dense() -> None:
    dense = workload(config={"dense_up_to": str(max(LENGTHS))})
    exact = ROWS[EXACT].of(workload())
    assert memory_at_most(dense) == memory_at_most(exact)
    by_lists = workload(config={"attention": "reference", "layer_budgets": "dense:all"})
    for lists, none in zip(memory_at_most(by_lists), memory_at_most(exact), strict=True):
        assert lists.total_bytes > none.total_bytes


def test_experts_take_time_and_memory() -> None:
    small = {"layers": 8, "shape": EXPERTS}
    assert outcome(**small).makespan_ms != outcome(layers=8).makespan_ms
    apart = [outcome(**small, expert_parallel_size=size) for size in (1, 2)]
    held = [each.stages[0].weights_bytes for each in apart]
    assert held[0] > held[1]
    assert apart[0].makespan_ms < apart[1].makespan_ms  # tokens travel
    whole, sharded = (outcome(**small, stages=1, sharded_parameters=each) for each in (False, True))
    assert sharded.stages[0].weights_bytes < whole.stages[0].weights_bytes


def test_prior_is_a_power_of_the_share_of_blocks() -> None:
    curves = prior_coverage(3, 256)
    assert curves.observed_LU.all()
    for blocks in (3, 40, 181):
        middle = 2 ** (np.floor(np.log2(blocks)) + 0.5)
        for budget in (1, 2):
            expected = min(budget / middle, 1.0) ** 0.35
            assert curves.coverage(2, blocks, budget) == pytest.approx(expected)
        assert curves.coverage(0, blocks, blocks) == 1.0


@pytest.mark.parametrize("text", ["[5, 7, 9]", "5\n7\n9\n", "5 7\n\n9"])
def test_files(tmp_path, text):
    path = tmp_path / "lengths"
    path.write_text(text)
    assert read_lengths(path).tolist() == [5, 7, 9]


@pytest.mark.parametrize(
    ("overlong", "samples"),
    [("split", [100, 100, 20, 50]), ("truncate", [100, 100, 50]), ("drop", [100, 50])],
)
def test_documents_longer_than_the_sequence(overlong, samples):
    assert samples_of(np.array([100, 120, 50]), 100, overlong).tolist() == samples
