# SPDX-License-Identifier: Apache-2.0
"""The simulator against a naive one, its bounds, and schedules that it does not know."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.plan_cases import costs_without_constants, flat, job_shape

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes, graph_of
from sparsebalance_megatron.plan.pipeline.orders import (
    Operation,
    PipelineOrder,
    SegmentedSchedule,
    megatron_order,
    schedule_name,
)
from sparsebalance_megatron.plan.pipeline.simulator import (
    longest_chain,
    longest_through_ms,
    makespans_ms,
    simulate,
)
from sparsebalance_megatron.plan.pipeline.step_bounds import step_bounds
from sparsebalance_megatron.plan.step_plan import PlanError


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


@given(pipelines())
def test_every_operation_of_the_longest_chain_delays_the_next(times):
    operations = flat(times[:, None])
    (events,) = simulate(operations)
    chain = longest_chain(operations).reshape(times.shape)
    path = sorted(
        (
            event
            for event in events
            if chain[
                int(event.direction is Direction.BACKWARD),
                event.stage,
                event.chunk,
                event.micro_batch,
            ]
        ),
        key=lambda event: (event.start_ms, event.end_ms),
    )
    assert path[0].start_ms == 0.0
    assert path[-1].end_ms == max(event.end_ms for event in events)
    for earlier, later in itertools.pairwise(path):
        assert later.start_ms == earlier.end_ms
    assert times[chain].sum() == pytest.approx(path[-1].end_ms, rel=1e-12)


def all_forwards_first(stages, micro_batches, chunks):
    """GPipe's order, which Megatron has not."""
    known = megatron_order(stages, micro_batches, chunks)
    order = tuple(
        Operation(direction, 0, m) for direction in Direction for m in range(micro_batches)
    )
    return PipelineOrder(by_stage=(order,) * stages, inputs=known.inputs)


def test_the_simulator_runs_a_schedule_that_it_does_not_know():
    times = np.stack([np.ones((1, 3, 1, 5)), 2 * np.ones((1, 3, 1, 5))])
    assert makespans_ms(flat(times, all_forwards_first))[0] == (5 + 2) * 3
    uneven = np.random.default_rng(0).random((2, 1, 3, 1, 5))
    assert makespans_ms(flat(uneven, all_forwards_first))[0] != makespans_ms(flat(uneven))[0]


def waits_for_two(stages, micro_batches, chunks):
    """Stage 1's forward of a micro-batch also waits for stage 0's forward of the next one."""
    known = megatron_order(stages, micro_batches, chunks)
    forward = [Operation(Direction.FORWARD, 0, m) for m in range(micro_batches)]
    inputs = dict(known.inputs)
    inputs[1, forward[0]] = ((0, forward[0]), (0, forward[1]))
    return PipelineOrder(by_stage=known.by_stage, inputs=inputs)


def test_an_operation_may_wait_for_several():
    times = flat(np.ones((2, 1, 2, 1, 3)), waits_for_two)
    events = {(e.stage, e.direction, e.micro_batch): e for e in simulate(times)[0]}
    assert events[1, "forward", 0].start_ms == events[0, "forward", 1].end_ms == 2.0
    assert longest_through_ms(times)[0, 0, 0, 1] == pytest.approx(makespans_ms(times)[0])


def without_inputs(stages, micro_batches, chunks):
    known = megatron_order(stages, micro_batches, chunks)
    return PipelineOrder(by_stage=known.by_stage[::-1], inputs=known.inputs)


def test_broken_schedules():
    with pytest.raises(PlanError, match="deadlocks"):
        flat(np.ones((2, 1, 2, 1, 3)), without_inputs)
    with pytest.raises(PlanError, match=r"schedule has 4 .*, times are of 8"):
        flat(np.ones((2, 1, 2, 2, 1)), lambda p, m, v: megatron_order(p, m, 1))


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
    assert len(graph.operations) == 2 * stages * sum(SEGMENTS)
    ms_OR = np.random.default_rng(seed).exponential(1.0, (len(graph.operations), ranks))
    times = OperationTimes(graph=graph, ms_OR=ms_OR, cp_sizes_RM=unshared(ranks, len(SEGMENTS)))
    order = SegmentedSchedule(SEGMENTS)(stages, len(SEGMENTS), 1)
    for rank in range(ranks):
        ms = dict(zip(graph.operations, ms_OR[:, rank], strict=True))
        ends = {}
        while len(ends) < len(ms):
            for stage, operations in enumerate(order.by_stage):
                for before, operation in zip((None, *operations), operations, strict=False):
                    waits_for = [*order.inputs[stage, operation]]
                    waits_for += [(stage, before)] if before else []
                    if all(node in ends for node in waits_for):
                        start = max((ends[node] for node in waits_for), default=0.0)
                        ends[stage, operation] = start + ms[stage, operation]
        events = simulate(times)[rank]
        found = {
            (e.stage, Operation(e.direction, e.chunk, e.micro_batch, e.segment)): e.end_ms
            for e in events
        }
        assert found == pytest.approx(ends)
        assert makespans_ms(times)[rank] == pytest.approx(max(ends.values()))
