# SPDX-License-Identifier: Apache-2.0
"""Outcomes: shares by hand, limits that must hold, the break-even, memory at most."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from predict.predict_cases import scenario

from sparsebalance_megatron.cost.parts import Part
from sparsebalance_megatron.cost.rates import DEFAULT_EFFICIENCY, Efficiency
from sparsebalance_megatron.predict.memory import memory_at_most
from sparsebalance_megatron.predict.models import MODELS
from sparsebalance_megatron.predict.outcome import Outcome, break_even_slowness, predict
from sparsebalance_megatron.predict.rows import best_row, dense_row, rows_of
from sparsebalance_megatron.predict.workload import Workload

LENGTHS = (4096, 900, 2048, 300, 8192, 512, 1024, 600)


def workload(batches: tuple[tuple[int, ...], ...] = (LENGTHS,), **changes: Any) -> Workload:
    return scenario(**changes).workload(batches)


def outcome(**changes: Any) -> Outcome:
    given = workload(**changes)
    return predict(best_row(given).of(given))


def test_shares_by_hand() -> None:
    found = outcome()
    within = sum(length for length in LENGTHS if length <= 128 * 8)
    assert found.dense_tokens_share == pytest.approx(within / sum(LENGTHS))
    assert 0.0 < found.router_share < 0.5
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
    many = workload(batches=tuple(tuple(np.roll(LENGTHS, n).tolist()) for n in range(4)))
    assert memory_at_most(few) == memory_at_most(many)
    for recompute in ("none", "attention", "full"):
        given = workload(batches=many.batches, recompute=recompute)
        for row in rows_of(given).values():
            found = predict(row.of(given))
            for held, most in zip(found.stages, found.stages_at_most, strict=True):
                assert held.total_bytes <= most.total_bytes
    # A sample of 64 blocks, of which each rank holds 8.
    layout = {"ranks": 8, "stages": 1, "context_parallel_size": 8, "micro_batches": 8}
    shared = workload(cap_tokens=1024, **layout)
    for row in (*rows_of(shared).values(), dense_row(shared)):
        found = predict(row.of(shared))
        assert found.stages[0].total_bytes <= found.stages_at_most[0].total_bytes
    segments = workload(config={"max_segments": 4, "segment_tokens": 256})
    found = predict(best_row(segments).of(segments))
    for held, most in zip(found.stages, found.stages_at_most, strict=True):
        assert held.total_bytes <= most.total_bytes


def test_at_the_break_even_sparse_and_dense_steps_take_as_long() -> None:
    given = workload(config={"base_budget": 4})
    sparse, dense = best_row(given).of(given), dense_row(given).of(given)
    outcomes = predict(sparse), predict(dense)
    slowness = break_even_slowness(sparse, *outcomes)
    assert slowness > 0
    cost = sparse.cost.with_attention_slowness(slowness)
    there = predict(replace(sparse, cost=cost))
    assert there.makespan_ms == pytest.approx(outcomes[1].makespan_ms, rel=0.01)
    # Stated as an efficiency, it does not depend on the one that was assumed.
    other = workload(config={"base_budget": 4}, efficiency=Efficiency(sparse=0.2))
    sparse = best_row(other).of(other)
    again = break_even_slowness(sparse, predict(sparse), outcomes[1])
    assert 0.2 / again == pytest.approx(DEFAULT_EFFICIENCY.sparse / slowness, rel=0.05)


def test_a_job_that_cannot_gain_has_no_break_even() -> None:
    given = workload()
    sparse = best_row(given).of(given)
    found = predict(sparse)
    free = replace(found, makespan_ms=found.makespan_ms / 1e3)
    assert break_even_slowness(sparse, found, free) == 0.0


def test_experts_take_time_and_memory() -> None:
    model = replace(MODELS["qwen3-30b-a3b"], layers=8)
    dense = replace(model, shape=replace(model.shape, experts=None))
    with_experts, without = outcome(model=model), outcome(model=dense)
    assert with_experts.makespan_ms != without.makespan_ms
    apart = [outcome(model=model, expert_parallel_size=size) for size in (1, 2)]
    held = [each.stages[0].weights_bytes for each in apart]
    assert held[0] > held[1]
    assert apart[0].makespan_ms < apart[1].makespan_ms  # tokens travel
    whole, sharded = (
        outcome(model=model, stages=1, sharded_parameters=each) for each in (False, True)
    )
    assert sharded.stages[0].weights_bytes < whole.stages[0].weights_bytes


def test_a_lockstep_group_takes_its_experts_for_the_mean_of_its_ranks() -> None:
    model = replace(MODELS["qwen3-30b-a3b"], layers=4)
    batch = (8000, 1000)
    layout = {"stages": 1, "micro_batches": 1, "expert_parallel_size": 2}
    given = workload(batches=(batch,), model=model, **layout)
    assert given.job.lockstep_ranks == 2
    given = rows_of(given)["baseline"].of(given)
    experts_ms = sum(
        rows[Part.EXPERTS][2] for rows in (given.cost.forward_ms, given.cost.backward_ms)
    )
    nothing = {Part.EXPERTS: (0.0,) * 5}
    without = replace(
        given.cost,
        forward_ms={**given.cost.forward_ms, **nothing},
        backward_ms={**given.cost.backward_ms, **nothing},
    )
    both = [predict(replace(given, cost=cost)).makespan_ms for cost in (given.cost, without)]
    assert both[0] - both[1] == pytest.approx(4 * experts_ms * sum(batch) / 2)
