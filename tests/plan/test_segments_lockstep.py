# SPDX-License-Identifier: Apache-2.0
"""Segments of ranks that wait for one another in every layer."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import (
    changed,
    cost_model,
    job_shape,
    makespans_of_cuts,
    planned,
    planned_no_slower,
    problem_of,
    random_lengths,
    step_inputs,
    tokens_in_flight,
    with_part,
)

from sparsebalance_megatron.cost.parts import SegmentCost
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.bounds import segmented_bound_ms
from sparsebalance_megatron.plan.segments import PlacedSegments, row_cuts

STAGES = 3
BLOCK = 64
EXPERTS_MS = (0.03, 0.001, 3e-4, 0.0, 0.0)
"""Ms of a layer's forward: per micro-batch, sequence, token, block pair and visible pair."""


def inputs(lengths, *, ranks=4, members=2, micro_batches=3, seed=0, free=False, **changes):
    job = replace(job_shape(ranks, micro_batches, stages=STAGES), lockstep_ranks=members)
    slowness_RP = 1 + 0.3 * np.random.default_rng(seed).random((ranks, STAGES))
    segments = SegmentCost(operation_ms=(0.01, 0.02))
    if free:
        segments = SegmentCost(slowness=1.0, operation_ms=(0.0, 0.0))
    return step_inputs(
        *(job, lengths, seed),
        cost=with_part(replace(cost_model(BLOCK), segments=segments), EXPERTS_MS),
        slowness_RP=slowness_RP if seed % 2 else None,
        **{"max_segments": 8, "segment_tokens": 256, **changes},
    )


@settings(max_examples=15)
@given(st.integers(0, 999), st.sampled_from([2, 4]))
def test_budgets_that_level_members_over_all_segments_end_in_time(seed, members):
    given_ = inputs(random_lengths(24, seed), members=members, seed=seed)
    planned_no_slower(given_, {"tuning": "off"})


def test_one_long_sample_is_cut_with_its_group_and_the_step_gets_shorter():
    lengths = [2**16, *[5000] * 3, *[700] * 7, 40]
    given_ = inputs(lengths, members=4)
    plan, whole = planned(**given_), planned(**changed(given_, max_segments=1))
    assert plan.expectation.makespan_ms < 0.75 * whole.expectation.makespan_ms
    (long,) = (each for each in plan.micro_batches if max(each.lengths_tokens) == 2**16)
    row = [each for each in plan.micro_batches if each.position == long.position]
    assert {each.segments for each in row} == {long.segments} and long.segments > 1
    # The other members' segments may be shorter than the least of one rank.
    assert min(each.segment_tokens(BLOCK).min() for each in row) < 2**16 / 8
    for rank in range(4):
        assert tokens_in_flight(plan, rank, BLOCK, STAGES) <= 2**16 + 2 * 5000


def random_rows(seed, segments):
    """A problem with a sample at every place, budgets, and equally drawn cuts in each row."""
    generator = np.random.default_rng(seed)
    lengths = generator.integers(segments * BLOCK, 5000, 12).tolist()
    problem = problem_of(inputs(lengths, seed=seed, free=True))
    budgets_LS = generator.integers(1, 40, (problem.job.layers, 12))
    where = Arrangement.of_placement(
        tuple(tuple((rank * 3 + position,) for position in range(3)) for rank in range(4))
    )
    blocks_S = problem.costs.blocks_S
    drawn = tuple(
        tuple(
            (0, *sorted(generator.choice(np.arange(1, blocks_S[sample]), segments - 1, False)))
            for (sample,) in rank
        )
        for rank in where.samples
    )
    return problem, budgets_LS, replace(where, segment_starts_blocks=drawn)


@given(st.integers(0, 999))
def test_one_segment_takes_what_a_whole_micro_batch_takes(seed):
    problem, budgets_LS, where = random_rows(seed, 1)
    costs, in_one_piece = problem.costs, replace(where, segment_starts_blocks=())
    placed, sample_2SX = PlacedSegments(costs, where), costs.sample_ms(budgets_LS)
    whole = costs.micro_batch_ms(sample_2SX, in_one_piece)
    ms_2UP = placed.ms(budgets_LS)
    ms_2EPM = ms_2UP.reshape(2, 2, 3, STAGES).swapaxes(2, 3)
    np.testing.assert_allclose(ms_2EPM, whole.by_micro_batch_2RPVM[:, :, :, 0], rtol=1e-9)
    # The schedule of segments with one segment each is 1F1B.
    found_E, whole_E = (problem.makespans_ms(budgets_LS, each) for each in (where, in_one_piece))
    np.testing.assert_allclose(found_E, whole_E, rtol=1e-9)
    own_2RPVM = placed.own_ms_2RPVM(budgets_LS)
    np.testing.assert_allclose(own_2RPVM, costs.own_ms_2RPVM(sample_2SX, in_one_piece), rtol=1e-9)


@given(st.integers(0, 999), st.integers(2, 5))
def test_segments_of_a_group_add_up_and_wait_for_the_slowest(seed, segments):
    """All segments together take at least the whole row, and at least every member alone."""
    problem, budgets_LS, where = random_rows(seed, segments)
    costs = problem.costs
    placed = PlacedSegments(costs, where)
    group_2EPM = placed.ms(budgets_LS).reshape(2, 2, 3, segments, STAGES).sum(3).swapaxes(2, 3)
    in_one_piece = replace(where, segment_starts_blocks=())
    whole = costs.micro_batch_ms(costs.sample_ms(budgets_LS), in_one_piece)
    whole_2EPM = whole.by_micro_batch_2RPVM[:, :, :, 0]
    assert (group_2EPM >= whole_2EPM * (1 - 1e-9)).all()
    without = replace(costs, experts_2CF=np.zeros_like(costs.experts_2CF))
    rows = [tuple(where.samples[rank][0] for rank in (0, 1))]
    blocks = [tuple(where.segment_starts_blocks[rank][0] for rank in (0, 1))]
    (row,) = row_cuts(without, budgets_LS, rows, blocks, [0], [1])
    (both,) = row_cuts(costs, budgets_LS, rows, blocks, [0], [1])
    assert (both.ms_2UP > row.ms_2UP).all()
    assert placed.own_ms_2RPVM(budgets_LS).shape == (2, 4, STAGES, 1, 3)


def test_the_bound_holds_for_every_placement_and_cut_of_a_group():
    """Two ranks of one group, all placements of four samples, rows in 1 to 3 segments."""
    lengths = [5000, 900, 300, 200]
    given_ = inputs(
        lengths, ranks=2, members=2, micro_batches=2, tuning="off", segment_tokens=64, free=True
    )
    problem = problem_of(given_)
    base_LS, blocks_S = problem.allowed.base_LS, problem.costs.blocks_S
    least = np.inf
    for order in itertools.permutations(range(4)):
        rows = [((order[0],), (order[1],)), ((order[2],), (order[3],))]
        for numbers in itertools.product((1, 2, 3), repeat=2):
            blocks = [
                tuple(tuple(int(blocks_S[s]) * u // many for u in range(many)) for (s,) in row)
                for row, many in zip(rows, numbers, strict=True)
            ]
            cuts = row_cuts(problem.costs, base_LS, rows, blocks, [0, 0], [1, 1])
            least = min(least, makespans_of_cuts([cuts]).max())
    assert 0.4 * least < segmented_bound_ms(problem) <= least
    assert planned(**given_).expectation.makespan_ms <= 1.1 * least
