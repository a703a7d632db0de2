# SPDX-License-Identifier: Apache-2.0
"""Moves, the states that they change, and what micro-batches take: all from sums of contents."""

from copy import deepcopy

import numpy as np
from hypothesis import given, settings
from plan.search.search_cases import SEEDS, SHAPES, Walk, random_case

from sparsebalance_megatron.plan.search.moves import Kind
from sparsebalance_megatron.plan.search.state import Numbers, State


@settings(max_examples=15)
@given(SHAPES, SEEDS)
def test_every_move_obeys(shape, seed):
    """It changes rank groups of its pair alone, so the best moves of all pairs are made at once."""
    case = random_case(*shape, seed)
    walk = Walk(case, each=4)
    group_places = walk.state.positions * case.rules.max_cp_size
    for _ in range(4):
        moves, ms_IYF = walk.draw()
        assert np.unique(moves.pair_I, return_counts=True)[1].max(initial=0) <= walk.each
        pair_of_group = {}
        for move, pair in enumerate(moves.pair_I.tolist()):
            after = deepcopy(walk)
            after.drawing.apply(moves, move, ms_IYF)
            case.check(after.arrangement)
            touched = set((moves.from_I2[move] // group_places).tolist())
            assert all(pair_of_group.setdefault(group, pair) == pair for group in touched)
            changed_J = (walk.state.cp_size_J != after.state.cp_size_J) | (
                walk.state.has_JX != after.state.has_JX
            ).any(axis=1)
            moved_S = walk.state.place_S != after.state.place_S
            assert moved_S.any() or changed_J.any()
            assert set((np.flatnonzero(changed_J) // group_places).tolist()) <= touched
        assert all(list(pair_of_group.values()).count(pair) <= 2 for pair in moves.pair_I.tolist())
        swaps = moves.kind_I == Kind.SWAP
        found_I2 = walk.state.place_S[moves.sample_I2] == moves.from_I2
        assert found_I2[:, 0].all() and found_I2[swaps].all()
        walk.step()


def test_every_pair_gets_its_moves():
    """Four pairs of ranks, each with many samples and room for more."""
    walk = Walk(random_case((8, 2, 1, 1), 1, 0, size=4, cap_over_start=4.0))
    moves, _ = walk.draw()
    counts_E = np.bincount(moves.pair_I)
    assert len(counts_E) == 4 and walk.each / 2 < counts_E.min() <= counts_E.max() <= walk.each


def kinds(max_cp_size):
    found = set()
    for seed in range(6):
        walk = Walk(random_case((4, 4, 2, 1), max_cp_size, 2 * seed, size=4))
        for _ in range(4):
            found |= set(walk.draw()[0].kind_I.tolist())
            walk.step()
    return found


def test_every_kind_of_move_is_drawn():
    """Where no ranks share, no micro-batch is merged or halved."""
    assert kinds(4) == set(Kind)
    assert kinds(1) == {Kind.SWAP, Kind.JOIN, Kind.POSITIONS}


@settings(max_examples=30)
@given(SHAPES, SEEDS)
def test_a_state_after_moves_is_that_of_its_arrangement(shape, seed):
    case = random_case(*shape, seed)
    walk = Walk(case)
    for _ in range(12):
        walk.step()
        state, where = walk.state, walk.arrangement
        case.check(where)
        anew = State(where, case.contents)
        np.testing.assert_array_equal(state.place_S, anew.place_S)
        np.testing.assert_array_equal(state.cp_size_J, anew.cp_size_J)
        np.testing.assert_array_equal(state.size_J, anew.size_J)
        np.testing.assert_allclose(state.has_JX, anew.has_JX, rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(state.ms_JF, anew.ms_JF, rtol=1e-9)


def test_numbers_are_splitmix64():
    """The first ones of seed 0."""
    numbers = Numbers()
    assert [*numbers.draw(1).tolist(), *numbers.draw(2).tolist()] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
