# SPDX-License-Identifier: Apache-2.0
"""The simulator against a naive one, against Megatron's own tables, and its bounds."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle

from sparsebalance_megatron.plan.schedules.bounds import micro_batch_bounds
from sparsebalance_megatron.plan.schedules.simulator import (
    makespans_ms,
    schedule_name,
    schedule_order,
    simulate,
)
from sparsebalance_megatron.plan.step_plan import PlanError


@st.composite
def pipelines(draw):
    schedule = draw(st.sampled_from(["no_pipeline", "1f1b", "interleaved"]))
    stages = 1 if schedule == "no_pipeline" else draw(st.integers(2, 4))
    chunks = 1 if schedule == "1f1b" else draw(st.integers(1, 3))
    micro_batches = draw(st.integers(1, 3 if schedule == "interleaved" else 7))
    if schedule == "interleaved":
        micro_batches *= stages
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (stages, chunks, micro_batches)
    forward, backward = generator.exponential(1.0, shape), generator.exponential(2.0, shape)
    if draw(st.booleans()):
        forward, backward = np.round(forward), np.round(backward)
    return schedule, forward, backward, draw(st.sampled_from([0.0, 0.25]))


@settings(max_examples=80, deadline=None)
@given(pipelines())
def test_events_match_naive_simulation(pipeline):
    schedule, forward, backward, p2p_ms = pipeline
    trace = simulate(
        forward, backward, schedule=schedule, virtual_stages=forward.shape[1], p2p_ms=p2p_ms
    )
    naive = oracle.run_pipeline(forward.tolist(), backward.tolist(), schedule, p2p_ms)
    assert len(trace.events) == len(naive) == 2 * forward.size
    for event in trace.events:
        key = (event.stage, event.kind[0].upper(), event.chunk, event.micro_batch)
        assert (event.start_ms, event.end_ms) == pytest.approx(naive[key], abs=1e-9)
    ends = [end for _, end in naive.values()]
    assert trace.makespan_ms == pytest.approx(max(ends), abs=1e-9)
    fast = makespans_ms(forward[None], backward[None], schedule=schedule, p2p_ms=p2p_ms)
    assert fast == pytest.approx(max(ends), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(pipelines())
def test_trace_is_consistent(pipeline):
    schedule, forward, backward, p2p_ms = pipeline
    trace = simulate(
        forward, backward, schedule=schedule, virtual_stages=forward.shape[1], p2p_ms=p2p_ms
    )
    assert trace.busy_ms == pytest.approx((forward + backward).sum(axis=(1, 2)))
    assert np.add(trace.busy_ms, trace.bubble_ms) == pytest.approx(trace.makespan_ms)
    path = trace.critical_path
    assert path[0].start_ms == 0.0
    assert path[-1].end_ms == trace.makespan_ms
    for earlier, later in itertools.pairwise(path):
        gap = p2p_ms if earlier.stage != later.stage else 0.0
        assert later.start_ms == pytest.approx(earlier.end_ms + gap, abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(pipelines(), st.integers(0, 2**32 - 1))
def test_makespan_grows_with_every_duration(pipeline, seed):
    schedule, forward, backward, p2p_ms = pipeline
    generator = np.random.default_rng(seed)
    more = forward + generator.exponential(1.0, forward.shape) * (
        generator.random(forward.shape) < 0.3
    )
    before, after = makespans_ms(
        np.stack([forward, more]), np.stack([backward, backward]), schedule=schedule, p2p_ms=p2p_ms
    )
    assert after >= before


@settings(max_examples=60, deadline=None)
@given(pipelines(), st.integers(1, 3), st.integers(0, 2**32 - 1))
def test_no_arrangement_beats_the_lower_bound(pipeline, ranks, seed):
    schedule, forward, _, p2p_ms = pipeline
    stages, chunks, micro_batches = forward.shape
    generator = np.random.default_rng(seed)
    shape = (ranks, stages, chunks, micro_batches)
    skew = generator.exponential(1.0, (1, stages, chunks, 1))
    forwards = generator.exponential(1.0, shape) * skew
    backwards = generator.exponential(2.0, shape) * skew
    bound = micro_batch_bounds(forwards, backwards, p2p_ms=p2p_ms).bound_ms
    for _ in range(8):
        order = generator.permutation(ranks * micro_batches)
        mixed = [
            np.moveaxis(times, 3, 1)
            .reshape(-1, stages, chunks)[order]
            .reshape(ranks, micro_batches, stages, chunks)
            .transpose(0, 2, 3, 1)
            for times in (forwards, backwards)
        ]
        assert makespans_ms(*mixed, schedule=schedule, p2p_ms=p2p_ms).max() >= bound * (1 - 1e-12)


def test_bounds_are_attained():
    uniform = np.ones((3, 4, 1, 8))
    balanced = makespans_ms(uniform, 2 * uniform).max()
    assert balanced == pytest.approx((8 + 4 - 1) * 3)
    assert micro_batch_bounds(uniform, 2 * uniform).bound_ms == pytest.approx(balanced)
    giant = np.full((1, 4, 1, 2), 1e-3)
    giant[..., 0] = 10.0
    assert makespans_ms(giant, giant).max() == pytest.approx(80.0, rel=1e-3)
    assert micro_batch_bounds(giant, giant).bound_ms == pytest.approx(80.0, rel=1e-3)


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (4, 3), (4, 8)])
def test_1f1b_order_is_megatrons(stages, micro_batches):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for stage in range(stages):
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            micro_batches, 1, None, p2p_communicator=_communicator(stages, stage, None)
        )
        order = schedule_order(stages, micro_batches, "1f1b", 1, stage)
        assert [kind for kind, _, _ in order[:warm_up]] == ["forward"] * warm_up
        assert "backward" in {kind for kind, _, _ in order[warm_up : warm_up + 2]}
        for kind in ("forward", "backward"):
            assert [m for k, _, m in order if k == kind] == list(range(micro_batches))


@pytest.mark.parametrize(("stages", "chunks", "groups"), [(2, 2, 1), (2, 3, 2), (4, 2, 2)])
def test_interleaved_order_is_megatrons(stages, chunks, groups):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    micro_batches = stages * groups
    table = schedules.get_schedule_table(micro_batches, chunks, stages)
    for stage in range(stages):
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            micro_batches, chunks, stages, p2p_communicator=_communicator(stages, stage, chunks)
        )
        order = schedule_order(stages, micro_batches, "interleaved", chunks, stage)
        forwards = [("forward", chunk, m) for m, chunk in table]
        backwards = [("backward", chunks - 1 - chunk, m) for m, chunk in table]
        expected = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            expected += [forward, backward]
        expected += backwards[len(table) - warm_up :]
        assert order == expected


def _communicator(stages, stage, chunks):
    group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    return SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)


def test_schedule_name():
    assert [schedule_name(1, 1), schedule_name(4, 1), schedule_name(4, 2)] == [
        "no_pipeline",
        "1f1b",
        "interleaved",
    ]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((4, 6, "interleaved", 2), "multiple of 4"),
        ((2, 4, "no_pipeline", 1), "use 1f1b"),
        ((2, 4, "1f1b", 2), "1 chunk"),
        ((2, 4, "zigzag", 1), "zigzag"),
        ((2, 0, "1f1b", 1), "at least 1"),
    ],
)
def test_impossible_schedules(arguments, words):
    with pytest.raises(PlanError, match=words):
        schedule_order(*arguments, 0)


def test_bad_times():
    good, bad = np.ones((2, 3)), np.full((2, 3), np.nan)
    with pytest.raises(PlanError, match="backward_ms"):
        simulate(good, bad)
    with pytest.raises(PlanError, match="forward_ms"):
        simulate(-good, good)
    with pytest.raises(PlanError, match=r"\(2, 1, 3\)"):
        simulate(good, np.ones((2, 4)))


def test_large_pipeline_is_exact():
    generator = np.random.default_rng(0)
    forward, backward = generator.random((2, 1, 16, 1, 64))
    expected = oracle.makespan(forward[0].tolist(), backward[0].tolist(), "1f1b")
    assert makespans_ms(forward, backward)[0] == pytest.approx(expected, rel=1e-12)
