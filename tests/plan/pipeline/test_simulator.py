# SPDX-License-Identifier: Apache-2.0
"""The simulator against a naive one, its bounds, and schedules that it does not know."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.pipeline.events import simulate
from plan.plan_cases import flat, longest_through, random_cp_sizes, shared_times

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.groups import Groups
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import megatron_order
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms

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


def schedule_name(stages: int, chunks: int) -> str:
    """The name of the schedule that Megatron-Core's ``get_forward_backward_func`` picks."""
    if stages == 1:
        return "no_pipeline"
    return "interleaved" if chunks > 1 else "1f1b"


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


LOCKSTEP = st.sampled_from(
    [(4, 1, 4), (8, 1, 8), (4, 2, 1), (4, 2, 4), (4, 4, 2), (6, 3, 1), (6, 6, 2), (8, 2, 8)]
)
"""Ranks, ranks of a lockstep group, ranks of the largest micro-batch."""


def waiting_times(sizes, shape, seed):
    """Times of ranks that wait for one another, equal where a micro-batch is shared; the oracle's
    events."""
    ranks, lockstep, most_ranks = sizes
    stages, chunks, positions = shape
    cp_sizes_RM = random_cp_sizes(ranks, positions, most_ranks, seed)
    times = shared_times((ranks, positions, stages, chunks), cp_sizes_RM, seed)
    name = schedule_name(stages, chunks)
    naive = oracle.waiting_pipelines(*times.tolist(), cp_sizes_RM.tolist(), name, lockstep)
    of_groups = times.reshape(2, -1, lockstep, *times.shape[2:]).max(axis=2)
    found = OperationTimes.of_micro_batches(
        of_groups, Groups(cp_sizes_RM).of_lockstep(lockstep).cp_sizes_RM, megatron_order
    )
    return found, naive


SHAPES = st.sampled_from([(1, 1, 3), (2, 1, 4), (3, 1, 3), (2, 2, 4), (4, 1, 3)])
"""Stages, chunks, micro-batches."""


@settings(max_examples=50)
@given(LOCKSTEP, SHAPES, st.integers(0, 2**32 - 1))
def test_ranks_of_a_lockstep_group_begin_and_end_together(sizes, shape, seed):
    """Every operation of every rank, where ranks share micro-batches as well."""
    times, naive = waiting_times(sizes, shape, seed)
    found = {
        (rank, e.stage, e.direction[0].upper(), e.chunk, e.micro_batch): (e.start_ms, e.end_ms)
        for group, events in enumerate(simulate(times))
        for rank in range(group * sizes[1], (group + 1) * sizes[1])
        for e in events
    }
    assert found.keys() == naive.keys()
    for place, span in naive.items():
        assert found[place] == pytest.approx(span, abs=1e-9)
    ends_R = [max(end for key, (_, end) in naive.items() if key[0] == r) for r in range(sizes[0])]
    assert np.repeat(makespans_ms(times), sizes[1]) == pytest.approx(ends_R, rel=1e-12)


@pytest.mark.parametrize(("ranks", "lockstep", "cp_size"), [(4, 3, 1), (6, 3, 2), (12, 6, 4)])
def test_lockstep_groups_that_micro_batches_straddle_are_refused(ranks, lockstep, cp_size):
    with pytest.raises(PlanError, match=f"lockstep groups of {lockstep} ranks"):
        Groups(np.full((ranks, 2), cp_size)).of_lockstep(lockstep)
