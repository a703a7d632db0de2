# SPDX-License-Identifier: Apache-2.0
"""The simulator against a naive one, its bounds, and schedules that it does not know."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.plan_cases import (
    costs_without_constants,
    flat,
    job_shape,
    longest_through,
    random_cp_sizes,
)

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.bounds import step_bounds
from sparsebalance_megatron.plan.context_groups import first_places, unshared
from sparsebalance_megatron.plan.pipeline.graph import graph_of
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import (
    SegmentedSchedule,
    megatron_order,
    schedule_name,
)
from sparsebalance_megatron.plan.pipeline.simulator import (
    makespans_ms,
    simulate,
)
from sparsebalance_megatron.plan.step_plan import PlanError

FORWARD, BACKWARD = Direction


@st.composite
def pipelines(draw):
    """Times [2, P, V, M]."""
    schedule = draw(st.sampled_from(["no_pipeline", "1f1b", "interleaved"]))
    stages = 1 if schedule == "no_pipeline" else draw(st.integers(2, 4))
    chunks = draw(st.integers(2, 3)) if schedule == "interleaved" else 1
    micro_batches = draw(st.integers(1, 3 if schedule == "interleaved" else 7))
    if schedule == "interleaved":
        micro_batches *= stages
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    times = generator.exponential([[[[1.0]]], [[[2.0]]]], (2, stages, chunks, micro_batches))
    return np.round(times) if draw(st.booleans()) else times


@settings(max_examples=80)
@given(pipelines())
def test_events_match_naive_simulation(times):
    name = schedule_name(*times.shape[1:3])
    (events,) = simulate(flat(times[:, None]))
    naive = oracle.run_pipeline(*times.tolist(), name)
    assert len(events) == len(naive) == times.size
    for event in events:
        key = (event.stage, event.direction[0].upper(), event.chunk, event.micro_batch)
        assert (event.start_ms, event.end_ms) == pytest.approx(naive[key], abs=1e-9)
    ends = [end for _, end in naive.values()]
    fast = makespans_ms(flat(times[:, None]))
    assert fast == pytest.approx(max(ends), abs=1e-9)


def bounds_of(times):
    """A step whose samples have a micro-batch each."""
    _, ranks, stages, chunks, micro_batches = times.shape
    job = job_shape(ranks, micro_batches, stages, chunks)
    return step_bounds(
        np.moveaxis(times, 4, 2).reshape(2, ranks * micro_batches, stages * chunks),
        costs_without_constants(job, ranks * micro_batches),
    )


def test_bounds_are_attained():
    uniform = np.ones((3, 4, 1, 8))
    times = np.stack([uniform, 2 * uniform])
    balanced = makespans_ms(flat(times)).max()
    assert balanced == pytest.approx((8 + 4 - 1) * 3)
    assert bounds_of(times).bound_ms == pytest.approx(balanced)
    giant = np.full((2, 1, 4, 1, 2), 1e-3)
    giant[..., 0] = 10.0
    assert makespans_ms(flat(giant)).max() == pytest.approx(80.0, rel=1e-3)
    assert bounds_of(giant).bound_ms == pytest.approx(80.0, rel=1e-3)


def all_forwards_first(stages, micro_batches, chunks):
    """GPipe's order, which Megatron has not."""
    known = megatron_order(stages, micro_batches, chunks)
    backward_PO = known.on_stage_PO >= known.on_stage_PO.size // 2
    forwards_first_PO = np.argsort(backward_PO, axis=1, kind="stable")
    on_stage_PO = np.take_along_axis(known.on_stage_PO, forwards_first_PO, axis=1)
    return replace(known, on_stage_PO=on_stage_PO, step_O=None)


def test_the_simulator_runs_a_schedule_that_it_does_not_know():
    times = np.stack([np.ones((1, 3, 1, 5)), 2 * np.ones((1, 3, 1, 5))])
    assert makespans_ms(flat(times, all_forwards_first))[0] == (5 + 2) * 3
    uneven = np.random.default_rng(0).random((2, 1, 3, 1, 5))
    assert makespans_ms(flat(uneven, all_forwards_first))[0] != makespans_ms(flat(uneven))[0]


def waits_for_two(stages, micro_batches, chunks):
    """Stage 1's forward of a micro-batch also waits for stage 0's forward of the next one."""
    known = megatron_order(stages, micro_batches, chunks)
    next_O = np.full(known.on_stage_PO.size, known.on_stage_PO.size)
    next_O[micro_batches] = 1
    return replace(known, inputs=(*known.inputs, next_O), step_O=None)


def test_an_operation_may_wait_for_several():
    times = flat(np.ones((2, 1, 2, 1, 3)), waits_for_two)
    events = {(e.stage, e.direction, e.micro_batch): e for e in simulate(times)[0]}
    assert events[1, "forward", 0].start_ms == events[0, "forward", 1].end_ms == 2.0
    assert longest_through(times)[0, 0, 0, 1] == pytest.approx(makespans_ms(times)[0])


def changed(**changes):
    """A broken schedule: 1F1B with other arrays."""

    def schedule(stages, micro_batches, chunks):
        order = megatron_order(stages, micro_batches, chunks)
        return replace(order, **{name: change(order) for name, change in changes.items()})

    return schedule


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (
            changed(
                on_stage_PO=lambda order: order.on_stage_PO[:, ::-1], step_O=lambda order: None
            ),
            "deadlocks",
        ),
        (changed(on_stage_PO=lambda order: order.on_stage_PO[::-1]), "each of its operations once"),
        (changed(step_O=lambda order: order.step_O[::-1]), "not later than what it waits for"),
        (lambda p, m, v: megatron_order(p, m - 1, v), "2 micro-batches, times are of 2, 1, 3"),
    ],
)
def test_broken_schedules(schedule, words):
    with pytest.raises(PlanError, match=words):
        flat(np.ones((2, 1, 2, 1, 3)), schedule)


def test_bad_times():
    for bad in (np.nan, -1.0):
        with pytest.raises(PlanError, match="negative or not finite"):
            simulate(flat(np.full((2, 1, 2, 1, 3), bad)))


SEGMENTS = (3, 1, 2, 1)
"""Number of segments of each micro-batch."""


@pytest.mark.parametrize("seed", range(3))
def test_segments_of_a_micro_batch_are_operations_of_their_own(seed):
    """Against ends that follow from the definition, operation by operation."""
    stages, ranks = 3, 2
    graph = graph_of(SegmentedSchedule(SEGMENTS), stages, 1, len(SEGMENTS))
    ms_OR = np.random.default_rng(seed).exponential(1.0, (2 * stages * sum(SEGMENTS), ranks))
    times = OperationTimes(graph=graph, ms_OR=ms_OR, cp_sizes_RM=unshared(ranks, len(SEGMENTS)))
    by_stage = SegmentedSchedule(SEGMENTS)(stages, len(SEGMENTS), 1).by_stage
    segments = [(m, segment) for m, many in enumerate(SEGMENTS) for segment in range(many)]
    places = list(itertools.product(Direction, range(stages), segments))
    for rank in range(ranks):
        ms = dict(zip(places, ms_OR[:, rank], strict=True))
        ends = {}
        while len(ends) < len(ms):
            for stage, operations in enumerate(by_stage):
                end_ms = 0.0
                for operation in operations:
                    place = operation.direction, stage, operation[2:]
                    source = oracle.input_of(
                        stages, 1, stage, operation.direction[0].upper(), 0, operation[2:]
                    )
                    if source is not None:
                        direction = FORWARD if source[1] == "F" else BACKWARD
                        source = direction, source[0], operation[2:]
                    if source is not None and source not in ends:
                        break
                    end_ms = max(end_ms, ends.get(source, 0.0)) + ms[place]
                    ends[place] = end_ms
        events = simulate(times)[rank]
        found = {(e.direction, e.stage, (e.micro_batch, e.segment)): e.end_ms for e in events}
        assert found == pytest.approx(ends)
        assert makespans_ms(times)[rank] == pytest.approx(max(ends.values()))


LOCKSTEP = st.sampled_from([(4, 2, 1), (4, 2, 4), (4, 4, 2), (6, 3, 1), (6, 6, 2), (8, 2, 8)])
"""Ranks, ranks of a lockstep group, ranks of the largest micro-batch."""


def waiting_times(sizes, shape, seed):
    """Times of ranks that wait for one another, equal where a micro-batch is shared; the oracle's
    events."""
    ranks, lockstep, widest = sizes
    stages, chunks, positions = shape
    cp_sizes_RM = random_cp_sizes(ranks, positions, widest, seed)
    times = np.random.default_rng(seed).exponential(1.0, (2, ranks, *shape))
    first_RM = first_places(cp_sizes_RM).reshape(ranks, positions) // positions
    times = np.take_along_axis(times, first_RM[None, :, None, None], axis=1)
    name = schedule_name(stages, chunks)
    naive = oracle.waiting_pipelines(*times.tolist(), cp_sizes_RM.tolist(), name, lockstep)
    found = OperationTimes.of_micro_batches(
        times, cp_sizes_RM, megatron_order, lockstep_ranks=lockstep
    )
    return found, naive


SHAPES = st.sampled_from([(1, 1, 3), (2, 1, 4), (3, 1, 3), (2, 2, 4)])
"""Stages, chunks, micro-batches."""


@settings(max_examples=30)
@given(LOCKSTEP, SHAPES, st.integers(0, 2**32 - 1))
def test_ranks_of_a_lockstep_group_begin_and_end_together(sizes, shape, seed):
    """Every operation of every rank, where ranks share micro-batches as well."""
    times, naive = waiting_times(sizes, shape, seed)
    found = {
        (rank, e.stage, e.direction[0].upper(), e.chunk, e.micro_batch): (e.start_ms, e.end_ms)
        for rank, events in enumerate(simulate(times))
        for e in events
    }
    assert found.keys() == naive.keys()
    for place, span in naive.items():
        assert found[place] == pytest.approx(span, abs=1e-9)
    ends_R = [max(end for key, (_, end) in naive.items() if key[0] == r) for r in range(sizes[0])]
    assert makespans_ms(times) == pytest.approx(ends_R, rel=1e-12)


@pytest.mark.parametrize(("ranks", "lockstep", "cp_size"), [(4, 3, 1), (6, 3, 2), (12, 6, 4)])
def test_lockstep_groups_that_micro_batches_straddle_are_refused(ranks, lockstep, cp_size):
    cp_sizes_RM = np.full((ranks, 2), cp_size)
    times = OperationTimes.of_micro_batches(
        np.ones((2, ranks, 2, 1, 2)), cp_sizes_RM, megatron_order, lockstep_ranks=lockstep
    )
    with pytest.raises(PlanError, match=f"lockstep groups of {lockstep} ranks"):
        makespans_ms(times)
