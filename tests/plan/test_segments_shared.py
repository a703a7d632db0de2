# SPDX-License-Identifier: Apache-2.0
"""Micro-batches that are shared by ranks and pass the pipeline in segments."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import (
    changed,
    cost_model,
    job_shape,
    planned,
    problem_of,
    random_cp_sizes,
    random_lengths,
    step_inputs,
    tokens_in_flight,
)

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.parts import Direction, SegmentCost
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.bounds import segmented_bound_ms
from sparsebalance_megatron.plan.groups import Groups
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms as simulated_ms
from sparsebalance_megatron.plan.segments import PlacedSegments, Places, row_cuts
from sparsebalance_megatron.plan.step_costs import step_costs

STAGES = 3
FREE = SegmentCost(slowness=1.0, operation_ms=(0.0, 0.0))


@st.composite
def steps_of_both(draw):
    """[R, M] cp_sizes and segments, equally many on all ranks of a micro-batch, and stages."""
    ranks, positions = draw(st.sampled_from([2, 4, 8])), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 999))
    cp_sizes_RM = random_cp_sizes(ranks, positions, ranks, seed)
    drawn_J = np.random.default_rng(seed).integers(1, 5, ranks * positions)
    segments_RM = drawn_J[Groups(cp_sizes_RM).first_J].reshape(ranks, positions)
    return cp_sizes_RM, segments_RM, draw(st.integers(2, 4))


def event_by_event_ms(cp_sizes_RM, segments_RM, ms_2UP):
    """[R] ends of ranks whose stages run their own operations in order, one after another; those of
    a micro-batch begin when all of its ranks have come to them."""
    ranks, positions = segments_RM.shape
    stages = ms_2UP.shape[2]
    most_RM = Groups(cp_sizes_RM).most_RM(segments_RM)
    pending = {
        (rank, stage): list(of_stage)
        for rank in range(ranks)
        for stage, of_stage in enumerate(
            SegmentedSchedule(tuple(segments_RM[rank]), tuple(most_RM[rank]))(
                stages, positions, 1
            ).by_stage
        )
    }
    first_unit_RM = (np.cumsum(segments_RM) - segments_RM.reshape(-1)).reshape(ranks, positions)
    free, ended = dict.fromkeys(pending, 0.0), {}

    def ready_ms(rank, stage, operation):
        """None until its rank has come to it and its input is there."""
        forward, _, m, segment = operation[0] is Direction.FORWARD, *operation[1:]
        if not pending[rank, stage] or pending[rank, stage][0] != operation:
            return None
        if forward and stage == 0:
            return free[rank, stage]
        if not forward and stage == stages - 1:
            key = rank, stage, Direction.FORWARD, m, segment
        else:
            key = rank, stage + (-1 if forward else 1), operation[0], m, segment
        return None if key not in ended else max(free[rank, stage], ended[key])

    while any(pending.values()):
        moved = False
        for (rank, stage), operations in pending.items():
            if not operations:
                continue
            operation = operations[0]
            m, segment = operation.micro_batch, operation.segment
            cp_size = cp_sizes_RM[rank, m]
            members = range(rank - rank % cp_size, rank - rank % cp_size + cp_size)
            ready = [ready_ms(member, stage, operation) for member in members]
            if None in ready:
                continue
            for member in members:
                direction = int(operation.direction is Direction.BACKWARD)
                unit = first_unit_RM[member, m] + segment
                end = max(ready) + ms_2UP[direction, unit, stage]
                ended[member, stage, operation.direction, m, segment] = free[member, stage] = end
                pending[member, stage].pop(0)
            moved = True
        assert moved, "ranks wait for each other"
    return [max(free[rank, stage] for stage in range(stages)) for rank in range(ranks)]


@settings(max_examples=60)
@given(steps_of_both(), st.integers(0, 999))
def test_makespans_are_those_of_a_simulation_event_by_event(step, seed):
    cp_sizes_RM, segments_RM, stages = step
    ms_2UP = np.random.default_rng(seed).uniform(0.1, 3.0, (2, segments_RM.sum(), stages))
    times = OperationTimes.of_segments(segments_RM.tolist(), ms_2UP, cp_sizes_RM)
    naive_R = event_by_event_ms(cp_sizes_RM, segments_RM, ms_2UP)
    assert simulated_ms(times) == pytest.approx(naive_R, rel=1e-12)


def inputs(lengths, *, ranks=2, positions=4, segments=FREE, slow=False, **changes):
    job = job_shape(ranks, positions, stages=STAGES)
    exchange = Exchange(
        bytes_per_token=512.0,
        gradient_bytes_per_token=1024.0,
        ms_per_byte=1e-8,
        loss=0.05,
        query_heads=2,
        kv_heads=2,
        heads_within=2,
    )
    slowness_RP = np.ones((ranks, STAGES))
    if slow:
        slowness_RP += np.random.default_rng(len(lengths)).uniform(0.0, 0.5, slowness_RP.shape)
    choices = {"max_segments": 8, "segment_tokens": 256, "max_cp_size": ranks}
    return step_inputs(
        *(job, lengths),
        cost=replace(cost_model(), segments=segments, exchange=exchange),
        slowness_RP=slowness_RP,
        context_parallel="dynamic",
        **choices | changes,
    )


def drawn_step(problem, seed, most):
    """Samples in random micro-batches, shared and cut at random."""
    job, generator = problem.job, np.random.default_rng(seed)
    ranks, positions = job.data_parallel_size, job.micro_batches
    cp_sizes_RM = random_cp_sizes(ranks, positions, ranks, seed)
    holder_J = Groups(cp_sizes_RM).first_J
    held = sorted(set(holder_J.tolist()))
    place_S = generator.choice(held, len(problem.lengths_tokens))
    place_S[generator.permutation(len(place_S))[: len(held)]] = held
    where = Arrangement.of_places(place_S, cp_sizes_RM)
    flat = [samples for of_rank in where.samples for samples in of_rank]
    blocks_J = []
    for place in holder_J.tolist():
        end = int(problem.costs.blocks_S[list(flat[place])].sum())
        cp_size = int(cp_sizes_RM.reshape(-1)[place])
        segments = min(1 + (seed * 7 + place) % most, max(1, end // cp_size))
        blocks_J.append(tuple(end * segment // segments for segment in range(segments)))
    segment_starts_blocks = [
        tuple(blocks_J[rank * positions :][:positions]) for rank in range(ranks)
    ]
    return replace(where, segment_starts_blocks=tuple(segment_starts_blocks))


@settings(max_examples=30)
@given(st.integers(0, 999), st.sampled_from([2, 4]), st.booleans())
def test_shared_micro_batches_in_one_segment_take_what_they_take_in_one_piece(seed, ranks, slow):
    given_ = {"ranks": ranks, "slow": slow, "segments": replace(FREE, dense_slowness=1.5)}
    lengths = random_lengths(4 * ranks, seed)
    problem = problem_of(inputs(lengths, **given_, dense_up_to=2048))
    where = drawn_step(problem, seed, 1)
    budgets_LS = problem.allowed.base_LS
    times_2RPVM = PlacedSegments(problem.costs, where).own_ms_2RPVM(budgets_LS)
    ms_R = problem.makespans_ms(budgets_LS, where)
    whole = problem.costs.micro_batch_ms(problem.costs.sample_ms(budgets_LS), where)
    np.testing.assert_allclose(times_2RPVM, whole.by_micro_batch_2RPVM, rtol=1e-9)
    np.testing.assert_allclose(ms_R, simulated_ms(whole), rtol=1e-9)


@given(st.integers(2, 9), st.sampled_from([2, 4]))
def test_every_segment_receives_the_keys_so_far(segments, cp_size):
    lengths = [64 * 72]
    given_ = inputs(lengths, ranks=4, positions=1)
    costs = step_costs(lengths, given_["job"], given_["cost"], given_["scales"])
    budgets_LS = np.full((given_["job"].layers, 1), 5)
    (starts,) = Places(costs, budgets_LS, 9).starts(((0,),), segments, 1)
    cut, alone = (
        row_cuts(costs, budgets_LS, [((0,),)], [(starts,)], [0], [size])[0] for size in (cp_size, 1)
    )
    beside_2P = segments * (costs.constant_2C + costs.sequence_2X)
    so_far = np.cumsum(alone.tokens_U).sum() / lengths[0] * costs.received_W[cp_size]
    exchanged_2P = costs.exchange_2X * lengths[0] * so_far
    alone_2P, found_2P = (each.ms_2UP.sum(axis=1) for each in (alone, cut))
    expected_2P = beside_2P + (alone_2P - beside_2P) * costs.share_W[cp_size] + exchanged_2P
    np.testing.assert_allclose(found_2P, expected_2P, rtol=1e-9)


def test_the_bound_holds_for_steps_of_both():
    """No drawn step at the least budgets ends sooner."""
    for number in range(8):
        lengths = random_lengths(6, number, longest=2**13)
        given_ = inputs(lengths, positions=2, slow=number % 2 == 1, segment_tokens=64)
        problem = problem_of(given_)
        floor_LS = problem.allowed.floor_LS
        least_ms = min(
            problem.makespans_ms(floor_LS, drawn_step(problem, seed, 4)).max() for seed in range(60)
        )
        bound_ms = segmented_bound_ms(problem, 2)
        assert 0.2 * least_ms < bound_ms <= least_ms * (1 + 1e-9)


def test_two_long_samples_on_four_ranks_are_shared_and_cut():
    lengths = [2**17, 2**17 - 5000, *[3000] * 14]
    segments = SegmentCost(operation_ms=(0.01, 0.02))
    given_ = inputs(lengths, ranks=4, segments=segments)
    plan = planned(**given_)
    long = [each for each in plan.micro_batches if max(each.lengths_tokens) > 2**16]
    assert all(each.cp_size > 1 and each.segments > 1 for each in long)
    least_ms = min(
        planned(**changed(given_, **fewer)).expectation.makespan_ms
        for fewer in ({"max_segments": 1}, {"context_parallel": "static"})
    )
    assert plan.expectation.makespan_ms < 0.85 * least_ms
    held = [tokens_in_flight(plan, rank, 64, STAGES) for rank in range(4)]
    assert max(held) <= 2**17 + 2 * 3000
