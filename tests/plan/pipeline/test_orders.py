# SPDX-License-Identifier: Apache-2.0
"""Orders against Megatron's own tables; schedules that do not exist."""

import itertools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import event, example, given
from hypothesis import strategies as st
from plan.plan_cases import random_cp_sizes

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.errors import ConfigError, PlanError
from sparsebalance_megatron.plan.groups import Groups
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.pipeline.graph import order_to_run
from sparsebalance_megatron.plan.pipeline.orders import (
    MegatronSchedule,
    Operation,
    SegmentedSchedule,
    megatron_order,
    most_tokens_in_flight,
)

FORWARD, BACKWARD = Direction


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 5), (4, 3), (4, 8)])
def test_1f1b_order_is_megatrons(stages, micro_batches):
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    for stage in range(stages):
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            micro_batches, 1, None, p2p_communicator=_communicator(stages, stage, None)
        )
        order = megatron_order(stages, micro_batches, 1).by_stage[stage]
        directions = [operation.direction for operation in order]
        assert directions[:warm_up] == [FORWARD] * warm_up
        assert BACKWARD in directions[warm_up : warm_up + 2]
        for direction in Direction:
            run = [each.micro_batch for each in order if each.direction is direction]
            assert run == list(range(micro_batches))


@pytest.mark.parametrize(
    ("stages", "chunks", "micro_batches", "group"),
    [
        *((2, 2, 2, None), (2, 3, 4, None), (4, 2, 8, None)),
        *((2, 2, 6, 3), (2, 2, 8, 3), (2, 3, 5, 5), (4, 2, 14, 5), (3, 2, 12, 4)),
    ],
)
def test_interleaved_order_is_megatrons(stages, chunks, micro_batches, group):
    """With a group size as well, also where the last group is a smaller one."""
    schedules = pytest.importorskip("megatron.core.pipeline_parallel.schedules")
    size = group or stages
    table = schedules.get_schedule_table(micro_batches, chunks, size)
    for stage in range(stages):
        _, _, warm_up, _ = schedules.get_pp_rank_microbatches(
            micro_batches, chunks, size, p2p_communicator=_communicator(stages, stage, chunks)
        )
        order = MegatronSchedule(group)(stages, micro_batches, chunks).by_stage[stage]
        forwards = [Operation(FORWARD, chunk, m) for m, chunk in table]
        backwards = [Operation(BACKWARD, chunks - 1 - chunk, m) for m, chunk in table]
        expected = forwards[:warm_up]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            expected += [forward, backward]
        expected += backwards[len(table) - warm_up :]
        assert list(order) == expected


def _communicator(stages, stage, chunks):
    group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
    return SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=chunks)


@pytest.mark.parametrize(
    ("schedule", "sizes", "words"),
    [
        (MegatronSchedule(None), (4, 6, 2), "multiple of 4"),
        (MegatronSchedule(None), (2, 0, 1), "at least 1"),
        (MegatronSchedule(1), (2, 4, 2), "from 2, the pipeline stages, to 4"),
        (MegatronSchedule(5), (2, 4, 2), "to 4"),
        (MegatronSchedule(3), (2, 4, 2), "multiple of 3, .* leave 1 for 2"),
        (SegmentedSchedule((1,)), (2, 2, 1), "for 2 micro-batches"),
        (SegmentedSchedule((1, 2, 3)), (2, 2, 1), "for 2 micro-batches"),
        (SegmentedSchedule((0, 1)), (2, 2, 1), "for 2 micro-batches"),
        (SegmentedSchedule((1, 2)), (2, 2, 2), "chunk"),
    ],
)
def test_orders_that_do_not_exist_are_refused(schedule, sizes, words):
    with pytest.raises(PlanError, match=words):
        schedule(*sizes)


def test_fewer_segments_than_own_ones_on_ranks_that_meet_are_refused():
    with pytest.raises(PlanError, match="of ranks that this one meets at most"):
        SegmentedSchedule((2, 3), (3, 2))(2, 2, 1)


@st.composite
def segmented_pipelines(draw):
    """Stages, and segments of each micro-batch."""
    stages = draw(st.integers(1, 6))
    return stages, tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=7)))


@given(segmented_pipelines())
def test_segments_run_in_the_order_of_the_first_stages_of_a_longer_1f1b(pipeline):
    """Forward one after another, and back in reverse within a micro-batch."""
    stages, segments_M = pipeline
    order = SegmentedSchedule(segments_M)(stages, len(segments_M), 1)
    longer = megatron_order(stages + max(segments_M), sum(segments_M), 1)
    forwards = [(m, s) for m, n in enumerate(segments_M) for s in range(n)]
    backwards = [(m, s) for m, n in enumerate(segments_M) for s in reversed(range(n))]
    for operations, expected in zip(order.by_stage, longer.by_stage[1:], strict=False):
        assert [o.direction for o in operations] == [o.direction for o in expected]
        for direction, places in ((FORWARD, forwards), (BACKWARD, backwards)):
            ran = [(o.micro_batch, o.segment) for o in operations if o.direction is direction]
            assert ran == places


@given(segmented_pipelines(), st.integers(0, 99))
def test_tokens_in_flight_are_counted(pipeline, seed):
    stages, segments_M = pipeline
    generator = np.random.default_rng(seed)
    tokens_U = generator.integers(1, 50, sum(segments_M))
    first_M = np.cumsum([0, *segments_M])
    most_M = tuple((generator.integers(0, 4, len(segments_M)) + segments_M).tolist())
    for schedule in (SegmentedSchedule(segments_M), SegmentedSchedule(segments_M, most_M)):
        order = schedule(stages, len(segments_M), 1)
        for operations, found in zip(
            order.by_stage, most_tokens_in_flight(order, tokens_U), strict=True
        ):
            held = most = 0
            for operation in operations:
                tokens = int(tokens_U[first_M[operation.micro_batch] + operation.segment])
                held += tokens if operation.direction is FORWARD else -tokens
                most = max(most, held)
            assert found == most


def test_an_order_that_training_cannot_run_is_refused():
    """Micro-batches are read by rising position, and a stage of several chunks is Megatron's."""

    def swapped(*sizes):
        order = megatron_order(*sizes)
        return replace(order, on_stage_PO=order.on_stage_PO[:, [1, 0, 2, 3]])

    with pytest.raises(PlanError, match="by rising micro-batch"):
        order_to_run(swapped, 2, 2, 1)
    with pytest.raises(ConfigError, match="one chunk"):
        Job(stage_layers=(((0,), (1,)),), data_parallel_size=1, order=swapped)


@pytest.mark.parametrize(
    ("stages", "chunks", "group", "micro_batches", "expected"),
    [
        *((4, 1, None, 8, [4, 3, 2, 1]), (4, 1, None, 2, [2, 2, 2, 1]), (1, 1, None, 8, [1])),
        *((2, 2, None, 8, [5, 3]), (2, 2, 4, 8, [7, 5]), (4, 2, None, 8, [11, 9, 7, 5])),
        (4, 2, None, 4, [8, 8, 7, 5]),
    ],
)
def test_chunks_in_flight(stages, chunks, group, micro_batches, expected):
    order = MegatronSchedule(group)(stages, micro_batches, chunks)
    assert most_tokens_in_flight(order, np.ones(micro_batches)).tolist() == expected


@st.composite
def meeting_ranks(draw):
    """Stages, and by rank the cp_size and the segments at each position."""
    ranks, positions = draw(st.sampled_from([1, 2, 4, 8])), draw(st.integers(1, 6))
    cp_sizes_RM = random_cp_sizes(ranks, positions, ranks, draw(st.integers(0, 999)))
    return draw(st.integers(1, 6)), cp_sizes_RM, _drawn_segments(cp_sizes_RM, draw(seeds))


seeds = st.integers(0, 999)


def _drawn_segments(cp_sizes_RM, seed):
    """As many for all ranks of a micro-batch."""
    ranks, positions = cp_sizes_RM.shape
    drawn_RM = np.random.default_rng(seed).integers(1, 5, (ranks, positions))
    return drawn_RM.reshape(-1)[Groups(cp_sizes_RM).first_J].reshape(ranks, positions)


def _schedules(cp_sizes_RM, segments_RM):
    most_RM = Groups(cp_sizes_RM).most_RM(segments_RM)
    return list(map(SegmentedSchedule, _tuples(segments_RM), _tuples(most_RM)))


def _tuples(numbers_RM):
    return list(map(tuple, numbers_RM.tolist()))


@given(meeting_ranks())
def test_ranks_that_meet_do_not_deadlock(job):
    stages, cp_sizes_RM, segments_RM = job
    _run_without_deadlock(stages, _schedules(cp_sizes_RM, segments_RM), cp_sizes_RM)


def test_ranks_that_meet_would_deadlock_in_their_own_orders():
    """Rank 0 runs two shared micro-batches forward, rank 1 one forward and backward."""
    cp_sizes_RM, segments_RM = np.array([[2, 2, 1]] * 2), np.array([[1, 1, 3], [1, 1, 1]])
    _run_without_deadlock(2, _schedules(cp_sizes_RM, segments_RM), cp_sizes_RM)
    with pytest.raises(AssertionError, match="wait for each other"):
        _run_without_deadlock(2, list(map(SegmentedSchedule, _tuples(segments_RM))), cp_sizes_RM)


@given(meeting_ranks())
def test_a_rank_with_fewer_segments_leaves_out_the_first_of_others(job):
    stages, cp_sizes_RM, segments_RM = job
    for schedule in _schedules(cp_sizes_RM, segments_RM):
        own_M, most_M = schedule.segments_M, schedule.most_segments_M
        order, whole = (
            each(stages, len(own_M), 1) for each in (schedule, SegmentedSchedule(most_M))
        )
        for found, operations in zip(order.by_stage, whole.by_stage, strict=True):
            renumbered = [
                each._replace(segment=each.segment - most_M[each[2]] + own_M[each[2]])
                for each in operations
            ]
            assert list(found) == [each for each in renumbered if each.segment >= 0]


@st.composite
def own_orders(draw):
    """Stages and an order of theirs, in which each runs its backwards as late as it likes."""
    stages, micro_batches = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    forwards = st.lists(
        st.integers(1, micro_batches), min_size=micro_batches, max_size=micro_batches
    )
    return _own_order([draw(forwards) for _ in range(stages)])


def _own_order(forwards_PM):
    """The order in which a stage has run so many forwards, or more, before its backwards."""
    stages, micro_batches = np.shape(forwards_PM)
    number_M = np.arange(micro_batches)
    late_PM = np.maximum.accumulate(np.maximum(forwards_PM, number_M + 1), axis=1)
    place_PO = np.concatenate([np.tile(number_M, (stages, 1)), late_PM - 0.5], axis=1)
    number_2PM = np.arange(2 * stages * micro_batches).reshape(2, stages, micro_batches)
    number_PO = np.concatenate(number_2PM, axis=1)
    on_stage_PO = np.take_along_axis(number_PO, np.argsort(place_PO, axis=1, kind="stable"), axis=1)
    whole = megatron_order(stages, micro_batches, 1)
    return replace(whole, on_stage_PO=on_stage_PO, step_O=None)


@given(own_orders())
@example(_own_order([[4] * 4, [1] * 4]))
@example(_own_order([[3] * 4, [1] * 4]))
def test_an_order_in_which_stages_wait_for_each_other_is_refused(order):
    sizes = order.stages, len(order.segments_M), 1

    def schedule(*_):
        return order

    try:
        _run_without_deadlock(order.stages, [schedule], np.ones((1, sizes[1]), dtype=int))
    except AssertionError:
        event("deadlocks")
        with pytest.raises(PlanError, match="deadlocks"):
            order_to_run(schedule, *sizes)
    else:
        assert order_to_run(schedule, *sizes) is order


def _run_without_deadlock(stages, schedules, cp_sizes_RM):
    """A stage posts what it sends after an operation with what it receives for the next one, and
    goes on when both have met their neighbour's; two forwards, or backwards, are posted one by
    one. An operation of a shared micro-batch ends when all of its ranks have come to it."""
    positions = cp_sizes_RM.shape[1]
    pending = [
        _events(order.by_stage[stage], rank, stage, stages, cp_sizes_RM[rank])
        for rank, order in enumerate(each(stages, positions, 1) for each in schedules)
        for stage in range(stages)
    ]
    while any(pending):
        posted = Counter(event for events in pending if events for event in events[0])
        met = {event for event, places in posted.items() if places == event[0]}
        assert met, f"stages wait for each other: {posted}"
        for events in pending:
            if events:
                events[0] -= met
                while events and not events[0]:
                    events.pop(0)


def _events(operations, rank, stage, stages, cp_sizes_M):
    """Sets of events (places that take part, what) that a stage posts together, in order."""

    def output(o):
        receiver = stage + (1 if o.direction is FORWARD else -1)
        return {(2, rank, stage, receiver, o)} if 0 <= receiver < stages else set()

    def input_(o):
        sender = stage - (1 if o.direction is FORWARD else -1)
        return {(2, rank, sender, stage, o)} if 0 <= sender < stages else set()

    def meeting(o):
        cp_size = int(cp_sizes_M[o.micro_batch])
        return {(cp_size, rank - rank % cp_size, stage, o)}

    posted = [input_(operations[0])]
    for before, after in itertools.pairwise(operations):
        posted.append(meeting(before))
        if before.direction is after.direction:
            posted += [output(before), input_(after)]
        else:
            posted.append(output(before) | input_(after))
    posted += [meeting(operations[-1]), output(operations[-1])]
    return [events for events in posted if events]
