# SPDX-License-Identifier: Apache-2.0
"""The search: never a longer step, always the same one, and near the best of all placements.

Its effort is a count: the same plan whatever the clock says, and more of it never hurts.
"""

import itertools
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import cost_model, job_shape, placed, with_part
from plan.search.search_cases import SEEDS, SHAPES, Case, random_case

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.groups import Groups
from sparsebalance_megatron.plan.search.annealing import Annealing
from sparsebalance_megatron.plan.search.cp_size_start import cp_size_start
from sparsebalance_megatron.plan.search.moves import Rules
from sparsebalance_megatron.plan.search_effort import SearchEffort
from sparsebalance_megatron.plan.step_costs import step_costs


def begun(case, plan_ms=100.0):
    """A search that has made no move."""
    return Annealing(case.start, case.costs, case.sample_2SX, case.rules, SearchEffort(plan_ms))


def annealed(case, plan_ms, **limits):
    return begun(case, plan_ms).best(**limits)


@settings(max_examples=15)
@given(SHAPES, SEEDS, st.sampled_from([0.0, 4.0, 20.0]))
def test_a_search_is_legal_and_never_slower(shape, seed, plan_ms):
    case = random_case(*shape, seed)
    found = annealed(case, plan_ms)
    case.check(found)
    assert case.ms_R(found).max() <= case.ms_R(case.start).max() * (1 + 1e-9)
    again = annealed(case, plan_ms)
    assert again.samples == found.samples
    np.testing.assert_array_equal(again.cp_sizes_RM, found.cp_sizes_RM)


def in_lockstep(shape, max_cp_size, seed):
    """A case whose ranks wait in every layer by twos; layers' budgets differ, but for two."""
    case = random_case(shape, max_cp_size, seed, slow=False)
    job = replace(case.costs.job, lockstep_ranks=2)
    cost = replace(cost_model(), exchange=case.costs.exchange)
    cost = with_part(cost, (0.0, 0.5, 5e-4, 0.0, 0.0))
    costs = step_costs(case.costs.lengths_tokens_S, job, cost, StageScales.ones(*shape[2:]))
    budgets_LS = np.random.default_rng(seed).integers(1, 40, (job.layers, len(costs.blocks_S)))
    budgets_LS[0] = budgets_LS[-1]
    rules = replace(case.rules, lockstep_ranks=2)
    return replace(case, costs=costs, sample_2SX=costs.sample_ms(budgets_LS), rules=rules)


@settings(max_examples=25)
@given(SHAPES, SEEDS, st.booleans())
def test_every_round_knows_how_long_its_placement_takes(shape, seed, lockstep):
    """From the times of the ranks that its moves touched; lockstep groups take what their slowest
    members take, layer by layer. No round loses a sample."""
    lockstep = lockstep and shape[0][0] % 2 == 0
    case = in_lockstep(*shape, seed) if lockstep else random_case(*shape, seed)
    search = begun(case)
    for _ in range(6):
        search._round()
        where = Arrangement.of_places(search.state.place_S, search.state.cp_sizes_RM.copy())
        case.check(where)
        ms_R = np.repeat(case.ms_R(where), case.rules.lockstep_ranks)
        assert search.ms_R == pytest.approx(ms_R, rel=1e-9)


@settings(max_examples=15)
@given(st.sampled_from([(3, 4, 2, 1), (2, 3, 4, 1), (2, 4, 2, 2), (2, 1, 2, 1)]), SEEDS)
def test_few_micro_batches_begin_in_the_best_of_all_orders(shape, seed):
    """Also where the plan buys no effort."""
    case = random_case(shape, 1, seed)
    found, placement = annealed(case, 0.0), case.start.samples
    every = itertools.permutations(range(len(placement[0])))
    ordered = [tuple(tuple(rank[m] for m in order) for rank in placement) for order in every]
    best_R = np.min([case.ms_R(Arrangement.of_placement(each)) for each in ordered], axis=0)
    assert case.ms_R(found) == pytest.approx(best_R, rel=1e-9)


@pytest.mark.parametrize("shape", [((4, 4, 2, 1), 1), ((4, 4, 2, 1), 4), ((4, 1, 1, 1), 2)])
def test_a_search_ends(shape):
    """Where the step is short enough, and where nothing is paid for."""
    case = random_case(*shape, 1, size=4)
    start_ms = case.ms_R(case.start).max()
    for limits in ({"enough_ms": 1.001 * start_ms}, {}):
        found = annealed(case, 20.0 if limits else 0.0, **limits)
        for rank, before in zip(found.samples, case.start.samples, strict=True):
            assert sorted(rank) == sorted(tuple(sorted(micro_batch)) for micro_batch in before)
    enough_ms = 0.95 * start_ms
    fine_ms = case.ms_R(annealed(case, 40.0, enough_ms=enough_ms)).max()
    best_ms = case.ms_R(annealed(case, 40.0)).max()
    assert best_ms <= fine_ms <= enough_ms


def every_placement(case, cp_sizes_RM):
    """All placements of the samples on these micro-batches that obey the cap and have a block for
    every rank."""
    places = np.unique(Groups(cp_sizes_RM).first_J)
    costs, cp_size_J = case.costs, cp_sizes_RM.reshape(-1)[places]
    for chosen in itertools.product(range(len(places)), repeat=len(costs.blocks_S)):
        tokens_J, blocks_J = (
            np.bincount(chosen, of_S, minlength=len(places))
            for of_S in (costs.lengths_tokens_S, costs.blocks_S)
        )
        if (tokens_J <= case.rules.cap_tokens * cp_size_J).all() and (blocks_J >= cp_size_J).all():
            yield placed(places[list(chosen)], costs.job, cp_sizes_RM)


@pytest.mark.parametrize(("shape", "samples"), [((2, 2, 2, 1), 6), ((2, 1, 1, 1), 9)])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_that_share_nothing_are_near_the_best_of_all_placements(shape, samples, seed):
    case = small_case(shape, samples, seed, max_cp_size=1)
    best_ms = min(case.ms_R(where).max() for where in every_placement(case, case.start.cp_sizes_RM))
    found_ms = case.ms_R(annealed(case, 20.0)).max()
    assert best_ms * (1 - 1e-9) <= found_ms <= 1.01 * best_ms


def test_cp_sizes_are_near_the_best_of_all():
    """Two ranks and two positions, each run by one rank alone or shared: 2 % in the mean. Five
    samples leave few moves, so some searches end where no single move helps."""
    ratios = []
    for stages, seed in itertools.product((1, 2), range(4)):
        case = small_case((2, 2, stages, 1), 5, seed, max_cp_size=2)
        choices = itertools.product(([1, 1], [2, 2]), repeat=2)
        best_ms = min(
            case.ms_R(where).max()
            for columns in choices
            for where in every_placement(case, np.array(columns).T)
        )
        starts = [
            cp_size_start(case.weights_S, case.costs, case.rules, most_over_mean)
            for most_over_mean in (np.inf, 4.0, 2.0, 1.0)
        ]
        start = min(starts, key=lambda where: case.ms_R(where).max())
        found = annealed(replace(case, start=start), 20.0)
        case.check(found)
        ratios.append(case.ms_R(found).max() / best_ms)
    assert min(ratios) >= 1 - 1e-9 and max(ratios) <= 1.06
    assert np.mean(ratios) <= 1.02


def small_case(shape, samples, seed, *, max_cp_size):
    """So many samples of a random case with one or two more in every micro-batch."""
    places = shape[0] * shape[1]
    case = random_case(shape, 1, seed, size=-(-samples // places), cap_over_start=4.0, slow=False)
    lengths = case.costs.lengths_tokens_S[:samples] + 64
    costs = step_costs(lengths, case.costs.job, cost_model(), StageScales.ones(shape[2]))
    return Case(
        costs=costs,
        sample_2SX=costs.sample_ms(np.full((costs.job.layers, samples), 8)),
        rules=replace(case.rules, cap_tokens=int(0.7 * lengths.sum()), max_cp_size=max_cp_size),
        start=placed(np.arange(samples) % places, costs.job),
    )


def test_a_micro_batch_is_not_filled_by_a_token_too_much():
    """The slower rank gets the shorter of two long samples alone, where the other has room."""
    lengths = [4000, 1000, 4001]
    start = Arrangement.of_placement((((0, 1),), ((2,),)))
    job = job_shape(2, 1)
    scales = StageScales.of(np.ones((2, 1, 1)), np.array([[2.0], [1.0]]))
    costs = step_costs(lengths, job, cost_model(), scales)
    sample_2SX = costs.sample_ms(np.full((job.layers, len(lengths)), 8))
    for cap, expected in ((5000, [4001, 5000]), (5001, [4000, 5001])):
        rules = Rules(cap_tokens=cap)
        case = Case(costs=costs, sample_2SX=sample_2SX, rules=rules, start=start)
        found = annealed(case, 20.0)
        tokens = [sum(lengths[sample] for sample in held) for (held,) in found.samples]
        assert tokens == expected


def test_more_effort_finds_better_placements():
    case = random_case((4, 6, 4, 1), 1, 4, size=2, cap_over_start=9.0)
    ms = [case.ms_R(annealed(case, plan_ms)).max() for plan_ms in (0.0, 1.0, 4.0, 64.0)]
    assert ms == sorted(ms, reverse=True)
    assert ms[-1] < 0.97 * ms[0]
    spent, enough = (annealed(case, 300.0, spends_all=each) for each in (True, False))
    assert case.ms_R(spent).max() < case.ms_R(enough).max()


def test_no_clock_is_read(monkeypatch):
    case = random_case((4, 6, 4, 1), 1, 5)
    expected = annealed(case, 2.0).samples

    def forbidden():
        raise AssertionError("ranks would stop at different moments")

    for name in ("time", "perf_counter", "monotonic", "process_time", "perf_counter_ns"):
        monkeypatch.setattr(time, name, forbidden)
    assert annealed(case, 2.0).samples == expected
