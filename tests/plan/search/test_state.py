# SPDX-License-Identifier: Apache-2.0
"""A state that moves have changed is the one that its arrangement would make anew."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from plan.search.search_cases import SEEDS, SHAPES, Walk, random_case

from sparsebalance_megatron.plan.search.state import State


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


@settings(max_examples=10)
@given(SHAPES, SEEDS)
def test_two_positions_exchanged_twice_are_where_they_were(shape, seed):
    case = random_case(*shape, seed)
    state = State(case.start, case.contents)
    positions, members = state.positions, case.rules.max_cp_size
    ranks = slice(members * (seed % (state.ranks // members)), state.ranks)
    for _ in range(2):
        state.exchange_positions(ranks, 0, positions - 1)
    anew = State(case.start, case.contents)
    for values, expected in zip(
        (state.place_S, state.cp_size_J, state.has_JX, state.ms_JF),
        (anew.place_S, anew.cp_size_J, anew.has_JX, anew.ms_JF),
        strict=True,
    ):
        np.testing.assert_array_equal(values, expected)
