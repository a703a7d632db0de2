# SPDX-License-Identifier: Apache-2.0
"""Segments: cuts, their times, their search, and plans that hold them."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import (
    changed,
    cost_model,
    job_shape,
    makespans_of_cuts,
    planned,
    problem_of,
    random_lengths,
    step_inputs,
    tokens_in_flight,
)

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.cost.parts import Direction, Part, SegmentCost
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.bounds import segmented_bound_ms
from sparsebalance_megatron.plan.pipeline.graph import graph_of
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.orders import SegmentedSchedule
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.search.segments import SegmentSearch
from sparsebalance_megatron.plan.segments import Places, row_cuts
from sparsebalance_megatron.plan.step_costs import VISIBLE, step_costs
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

STAGES = 3
FREE = SegmentCost(slowness=1.0, operation_ms=(0.0, 0.0))


@given(st.lists(st.integers(1, 6), min_size=1, max_size=7), st.integers(1, 5), st.integers(0, 99))
def test_makespans_of_candidates_are_those_of_each_alone(segments_M, stages, seed):
    ms_2UP = np.random.default_rng(seed).uniform(0.1, 3.0, (2, 3 + sum(segments_M), stages))
    graph = graph_of(SegmentedSchedule(tuple(segments_M)), stages, 1, len(segments_M))
    ms_OR = ms_2UP[:, 3:].swapaxes(1, 2).reshape(-1, 1)
    alone = OperationTimes(graph=graph, ms_OR=ms_OR, cp_sizes_RM=np.ones((1, len(segments_M)), int))
    both = OperationTimes.of_segments([[1, 2], segments_M], ms_2UP)
    assert makespans_ms(both)[1] == pytest.approx(makespans_ms(alone)[0], rel=1e-12)


@given(
    lengths=st.lists(st.integers(1, 4000), min_size=1, max_size=4),
    segments=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_segments_add_up_to_the_micro_batch(lengths, segments, seed):
    """Without other costs of cutting than a slower dense attention, what segments take is what the
    samples take in one piece."""
    job = job_shape(1, 1, stages=STAGES)
    cost = replace(cost_model(), segments=replace(FREE, dense_slowness=1.5))
    dense_LS = np.random.default_rng(seed + 1).random((job.layers, len(lengths))) < 0.3
    costs = step_costs(lengths, job, cost, StageScales.ones(STAGES, 1), dense_LS)
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (job.layers, len(lengths)))
    samples = tuple(range(len(lengths)))
    (starts,) = Places(costs, budgets_LS, 9).starts((samples,), segments, 1)
    # Cut together with another micro-batch, as plans cut them.
    both = [(samples[:1],), (samples,)]
    _, cut = row_cuts(costs, budgets_LS, both, [((0,),), (starts,)], [0, 0], [1, 1])
    blocks = int(costs.blocks_S.sum())
    assert len(starts) == min(segments, blocks)
    bounds = [*starts, blocks]
    assert bounds[0] == 0 and all(first < end for first, end in itertools.pairwise(bounds))
    assert cut.tokens_U.sum() == sum(lengths)
    pieces = len(starts)
    whole_2P = costs.sample_ms(budgets_LS).sum(axis=1) + costs.constant_2C
    ends_S = np.cumsum(costs.blocks_S)
    crossed = sum(int(block not in {0, *ends_S.tolist()}) for block in starts)
    expected_2P = whole_2P + (pieces - 1) * costs.constant_2C + crossed * costs.sequence_2X
    if pieces > 1:
        visible_S = costs.work.visible_pairs(costs.length_blocks_S)
        visible_P = [visible_S @ dense_LS[layers].sum(axis=0) for ((*layers,),) in job.stage_layers]
        pair_2 = [cost.coefficients_ms(Part.DENSE_ATTENTION, each)[VISIBLE] for each in Direction]
        expected_2P += 0.5 * np.outer(pair_2, visible_P)
    np.testing.assert_allclose(cut.ms_2UP.sum(axis=1), expected_2P, rtol=1e-9)


@given(
    lengths=st.lists(
        st.lists(st.integers(1, 3000), min_size=1, max_size=3), min_size=1, max_size=3
    ),
    segments=st.integers(1, 9),
    least_tokens=st.integers(1, 700),
    least_blocks=st.sampled_from([1, 2, 4]),
)
def test_segments_are_no_shorter_than_the_least(lengths, segments, least_tokens, least_blocks):
    """A segment has the least tokens in one of the members that are cut alike."""
    flat = list(itertools.chain.from_iterable(lengths))
    ends = itertools.accumulate(map(len, lengths), initial=0)
    row = tuple(tuple(range(*part)) for part in itertools.pairwise(ends))
    job = job_shape(1, 1, stages=STAGES)
    costs = step_costs(flat, job, cost_model(), StageScales.ones(STAGES, 1))
    places = Places(costs, np.full((job.layers, len(flat)), 8), 9)
    found = places.starts(row, segments, least_tokens, least_blocks)
    (number,) = {len(starts) for starts in found}
    assert number <= segments
    if number > 1:
        plans = [
            MicroBatchPlan(
                samples=samples,
                lengths_tokens=tuple(flat[sample] for sample in samples),
                budgets_LS=np.ones((1, len(samples))),
                rank=0,
                position=0,
                segment_starts_blocks=starts,
            )
            for samples, starts in zip(row, found, strict=True)
        ]
        tokens_WU = np.array([plan.segment_tokens(64) for plan in plans])
        assert tokens_WU.max(axis=0).min() >= least_tokens
        blocks = [int(costs.blocks_S[list(samples)].sum()) for samples in row]
        assert all(
            np.diff(starts, append=end).min() >= least_blocks
            for starts, end in zip(found, blocks, strict=True)
        )


def inputs(lengths, *, micro_batches=4, **changes):
    job = job_shape(2, micro_batches, stages=STAGES)
    cost = replace(cost_model(), segments=SegmentCost(operation_ms=(0.01, 0.02)))
    return step_inputs(
        *(job, lengths), cost=cost, **{"max_segments": 8, "segment_tokens": 256} | changes
    )


def test_one_long_sample_is_cut_and_the_step_gets_shorter():
    lengths = [2**17, *[3000] * 7]
    given_ = inputs(lengths)
    plan = planned(**given_)
    whole = planned(**changed(given_, max_segments=1))
    (long,) = (each for each in plan.micro_batches if max(each.lengths_tokens) == 2**17)
    assert long.segments >= 7
    assert plan.expectation.makespan_ms < 0.7 * whole.expectation.makespan_ms
    assert plan.digest() != whole.digest()


def test_no_step_holds_more_tokens_than_1f1b():
    """Nor than the plan of the same step in one piece."""
    for seed in range(5):
        given_ = inputs(random_lengths(8, seed))
        plan = planned(**given_)
        whole = planned(**changed(given_, max_segments=1))
        one_piece = max(
            sum(each.tokens for each in whole.for_rank(rank).micro_batches[m : m + STAGES])
            for rank in range(2)
            for m in range(4)
        )
        for rank in range(2):
            assert all(
                each.segment_tokens(64).sum() == each.tokens
                for each in plan.for_rank(rank).micro_batches
            )
            assert tokens_in_flight(plan, rank, 64, STAGES) <= one_piece


def test_the_bound_holds_for_every_placement_and_cut():
    """All placements of four samples, every micro-batch in 1 to 3 segments."""
    given_ = inputs([5000, 900, 300, 64], micro_batches=2, tuning="off", segment_tokens=64)
    problem = problem_of(given_)
    base_LS = problem.allowed.base_LS
    places = Places(problem.costs, base_LS, 3)
    cut_of = {
        (sample, many): row_cuts(
            *(problem.costs, base_LS, [((sample,),)]),
            *([places.starts(((sample,),), many, 64)], [0], [1]),
        )[0]
        for sample in range(4)
        for many in (1, 2, 3)
    }
    least = np.inf
    for order in itertools.permutations(range(4)):
        for segments in itertools.product((1, 2, 3), repeat=4):
            chosen = [cut_of[sample, segments[sample]] for sample in order]
            least = min(least, makespans_of_cuts([chosen[:2], chosen[2:]]).max())
    bound_ms = segmented_bound_ms(problem)
    assert 0.6 * least < bound_ms <= least
    assert planned(**given_).expectation.makespan_ms <= 1.1 * least


LENGTHS = (60000, 50000, 40000, 30000, 900, 800, 700, 600)
LOPSIDED = (((0,), (1,), (2,), (3,)), ((4,), (5,), (6,), (7,)))
MOST_TOKENS = 200_000


def searched(most_tokens: int = MOST_TOKENS, **changes):
    problem = problem_of(inputs(LENGTHS, tuning="off", **changes))
    where, ms = SegmentSearch(problem, Arrangement.of_placement(LOPSIDED), most_tokens).best()
    return problem, where, ms


def test_long_samples_of_one_rank_are_traded_away():
    """What is found takes what the search says and holds every sample once."""
    problem, where, ms = searched()
    ms_R = problem.makespans_ms(problem.allowed.base_LS, where)
    assert ms == pytest.approx(ms_R.max(), rel=1e-12)
    held = sorted(sample for rank in where.samples for samples in rank for sample in samples)
    assert held == list(range(8)) and where.is_cut
    long = [sum(sample < 4 for (sample,) in rank) for rank in where.samples]
    assert long == [2, 2]
    _, start, start_ms = searched(plan_ms=1e-9)
    assert [sorted(rank) for rank in start.samples] == [sorted(rank) for rank in LOPSIDED]
    assert ms < 0.7 * start_ms
    assert start.is_cut


def test_no_order_is_found_where_all_hold_too_many_tokens():
    *_, ms = searched(most_tokens=1)
    assert ms == np.inf
