# SPDX-License-Identifier: Apache-2.0
"""Orders of few micro-batches are the best of all; of more, near it."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.search.search_cases import SEEDS, random_case

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.search.orders import in_best_orders


def best_ms_R(case):
    """The least makespan of every rank over all orders of its micro-batches."""
    placement = case.start.samples
    orders = itertools.permutations(range(len(placement[0])))
    return np.min(
        [
            case.ms_R(
                Arrangement.of_groups(tuple(tuple(rank[m] for m in order) for rank in placement))
            )
            for order in orders
        ],
        axis=0,
    )


def ordered(case, plan_ms):
    """[R] makespans in the orders found, which hold the same micro-batches."""
    found = in_best_orders(case.start.samples, case.costs, case.sample_2SC, plan_ms=plan_ms)
    assert [sorted(rank) for rank in found] == [sorted(rank) for rank in case.start.samples]
    return case.ms_R(Arrangement.of_groups(found))


@settings(max_examples=15)
@given(
    st.sampled_from([(3, 4, 2, 1), (2, 3, 4, 1), (2, 4, 2, 2), (2, 2, 3, 1), (2, 1, 2, 1)]),
    SEEDS,
)
def test_few_micro_batches_are_in_the_best_of_all_orders(shape, seed):
    """Also where the plan buys no effort."""
    case = random_case(shape, 1, seed)
    assert ordered(case, 0.0) == pytest.approx(best_ms_R(case), rel=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_six_micro_batches_are_near_the_best_of_all_orders(seed):
    case = random_case((2, 6, 3, 1), 1, seed, size=1)
    best = best_ms_R(case)
    assert (best * (1 - 1e-9) <= ordered(case, 20.0)).all()
    assert (ordered(case, 20.0) <= 1.02 * best).all()
    assert (case.ms_R(case.start) >= ordered(case, 0.0) * (1 - 1e-9)).all()


def test_swaps_shorten_what_the_first_orders_leave():
    """Twelve micro-batches; where no swaps are paid for, the first orders stay."""
    case = random_case((2, 12, 4, 1), 1, 0, size=1)
    first, swapped = ordered(case, 0.0), ordered(case, 20.0)
    assert (swapped <= first).all()
    assert swapped.min() < 0.995 * first.min()


def test_a_rank_without_a_pipeline_keeps_its_order():
    case = random_case((3, 4, 1, 1), 1, 0)
    found = in_best_orders(case.start.samples, case.costs, case.sample_2SC, plan_ms=20.0)
    assert found == case.start.samples
