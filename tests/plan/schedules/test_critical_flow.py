# SPDX-License-Identifier: Apache-2.0
"""The flow of critical chains: it is how the step's end moves, and parts where chains are alike."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import random_widths, shared_times

from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.schedules.critical_flow import critical_flow
from sparsebalance_megatron.plan.schedules.orders import megatron_order
from sparsebalance_megatron.plan.schedules.simulator import makespans_ms

SHAPES = [(4, 4, 2, 1), (2, 8, 4, 1), (4, 4, 2, 2), (4, 3, 1, 1)]
"""Ranks, micro-batches, stages, chunks."""
SEEDS = st.integers(0, 2**32 - 1)


def random_step(shape, widest, seed):
    """Times, and widths of slots that ranks share; None where none do."""
    ranks, positions, _, _ = shape
    widths_RM = random_widths(ranks, positions, widest, seed)
    return shared_times(shape, widths_RM, seed), widths_RM if widest > 1 else None


def makespan_ms(times, widths_RM):
    return float(makespans_ms(times, widths_XM=widths_RM).max())


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from([1, 2]), SEEDS)
def test_it_is_the_derivative_of_the_makespan(shape, widest, seed):
    """Of all members of a slot together; with a blur below any gap between chains."""
    times, widths_RM = random_step(shape, widest, seed)
    blur_ms, growth_ms = 1e-7, 1e-8
    flow = critical_flow(times, megatron_order, widths_RM, blur_ms)
    before_ms = makespan_ms(times, widths_RM)
    assert (flow * times).sum() == pytest.approx(before_ms, rel=1e-9)
    ranks, positions, stages, chunks = shape
    widths = np.ones((ranks, positions), int) if widths_RM is None else widths_RM
    first_RM = first_places(widths).reshape(ranks, positions)
    generator = np.random.default_rng(seed)
    for place in generator.choice(np.unique(first_RM), 4):
        members = first_RM == place
        direction, stage, chunk = (int(generator.integers(n)) for n in (2, stages, chunks))
        grown = times.copy()
        grown[direction, :, stage, chunk][members] += growth_ms
        moved = (makespan_ms(grown, widths_RM) - before_ms) / growth_ms
        through = flow[direction, :, stage, chunk][members].sum()
        assert through == pytest.approx(moved, abs=1e-4)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(SHAPES), st.sampled_from([1, 2, 4]), SEEDS, st.floats(0.01, 0.5))
def test_all_of_it_passes_through_every_cut(shape, widest, seed, blur):
    """What flows is a mixture of chains, each no longer than the step."""
    widest = min(widest, shape[0])
    times, widths_RM = random_step(shape, widest, seed)
    end_ms = makespan_ms(times, widths_RM)
    flow = critical_flow(times, megatron_order, widths_RM, blur * end_ms)
    assert flow.min() >= 0.0
    assert (flow * times).sum() <= end_ms * (1 + 1e-9)
    # A step ends with a backward of the first chunk of the first stage, on some rank.
    assert flow[1, :, 0, 0].sum() >= 1.0 - 1e-9


def test_chains_of_one_length_share_it():
    times = np.ones((2, 2, 1, 1, 3))
    flow = critical_flow(times, megatron_order, None, 0.1)
    np.testing.assert_allclose(flow, 0.5)


def test_ranks_that_end_early_have_none():
    times = np.ones((2, 2, 1, 1, 3))
    times[:, 1] *= 0.9
    flow = critical_flow(times, megatron_order, None, 0.1)
    np.testing.assert_allclose(flow[:, 0], 1.0)
    np.testing.assert_allclose(flow[:, 1], 0.0)
    # Six less five and 0.4 of the blur: (1 - 0.6)^2 against 1.
    flow = critical_flow(times, megatron_order, None, 1.0)
    np.testing.assert_allclose(flow[:, 1], 0.16 / 1.16)


def test_a_shared_slot_waits_for_the_later_rank():
    """Before it, only the rank that came last delays the step."""
    times = np.ones((2, 2, 1, 1, 2))
    times[:, 1, ..., 0] = 3.0
    widths_RM = np.array([[1, 2], [1, 2]])
    flow = critical_flow(times, megatron_order, widths_RM, 0.5)
    np.testing.assert_allclose(flow[:, 0, ..., 0], 0.0)
    np.testing.assert_allclose(flow[:, 1, ..., 0], 1.0)
    np.testing.assert_allclose(flow[..., 1].sum(axis=1), 1.0)
