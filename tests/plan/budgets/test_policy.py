# SPDX-License-Identifier: Apache-2.0
"""Budgets: floors hold, anchors come nearer, steps never grow, raises are nearly the best."""

import bisect
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.plan_cases import (
    job_shape,
    placed,
    problem_of,
    random_lengths,
    step_inputs,
)

from sparsebalance_megatron.plan.budgets import policy as budget_policies
from sparsebalance_megatron.plan.budgets.policy import tune
from sparsebalance_megatron.plan.budgets.price import Ladder
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms


class Case:
    """A placed global batch; positions hold samples in turn."""

    def __init__(self, seed, tuning, *, shape=(2, 4, 2, 1), observed=1.0, lengths=None, **changes):
        generator = np.random.default_rng(seed)
        self.job = job_shape(*shape)
        samples = len(lengths or ()) or self.job.places * int(generator.integers(1, 3))
        lengths = lengths or random_lengths(samples, seed, longest=20000)
        changes |= {"tuning": tuning, "base_budget": int(generator.integers(1, 40))}
        inputs = step_inputs(self.job, lengths, seed, max_blocks=400, observed=observed, **changes)
        self.problem = problem_of(inputs)
        self.coverage, self.costs = self.problem.coverage, self.problem.costs
        self.micro_batch_of_S = np.arange(samples) % self.job.places
        self.allowed = self.problem.allowed
        self.where = placed(self.micro_batch_of_S, self.job)
        self.tuned = tune(self.problem, self.where)

    def times(self, budgets_LS):
        return self.problem.micro_batch_ms(budgets_LS, self.where)

    def makespan(self, budgets_LS):
        return makespans_ms(self.times(budgets_LS)).max()

    def latencies(self, budgets_LS):
        return self.times(budgets_LS).by_micro_batch_2RPVM.sum(axis=(0, 2, 3)).ravel()

    def covered(self, budgets_LS):
        return self.coverage.coverage_LS(self.costs.blocks_S, budgets_LS)


SHAPES = st.sampled_from([(2, 4, 2, 1), (3, 2, 1, 1), (1, 4, 2, 2), (2, 3, 4, 1)])
SEEDS = st.integers(0, 2**32 - 1)


@given(SEEDS, SHAPES)
def test_anchor_moves_nobody_away(seed, shape):
    case = Case(seed, "anchor", shape=shape)
    before = case.latencies(case.allowed.base_LS)
    target = before.mean()
    after = case.latencies(case.tuned.budgets_LS)
    assert (np.abs(after - target) <= np.abs(before - target) + 1e-9 * target).all()
    slower_S = (before > target)[case.micro_batch_of_S]
    assert not (case.tuned.raised_S & slower_S).any()
    assert not (case.tuned.cut_S & ~slower_S).any()


@pytest.mark.parametrize("seed", range(6))
def test_micro_batches_end_within_a_step_of_the_anchor(seed):
    """The step is one of budgets, in some layer and sample whose limits allow it."""
    lengths = [9000 + 300 * micro_batch for micro_batch in range(8)]
    case = Case(seed, "anchor", lengths=lengths, coverage_threshold=0.999)
    target = case.latencies(case.allowed.base_LS).mean()
    after = case.latencies(case.tuned.budgets_LS)
    lowest, highest = case.latencies(case.allowed.floor_LS), case.latencies(case.allowed.top_LS)
    free = np.flatnonzero((lowest <= target * (1 + 1e-9)) & (highest >= target * (1 - 1e-9)))
    grid = np.asarray(case.coverage.grid)
    steps = case.costs.block_pairs(
        np.broadcast_to(grid[:, None], (len(grid), len(case.micro_batch_of_S)))
    )
    largest = np.diff(steps, axis=0).max(axis=0) * case.costs.pair_ms_L.max()
    assert len(free) >= 4
    for micro_batch in free:
        assert abs(after[micro_batch] - target) <= largest[
            case.micro_batch_of_S == micro_batch
        ].max() * (1 + 1e-9)


@settings(max_examples=25)
@given(SEEDS, st.floats(0.05, 0.95))
def test_coverage_is_within_one_step_of_the_best(seed, share):
    """Greedy on concave curves loses at most the gain of the first step that does not fit."""
    generator = np.random.default_rng(seed)
    job = job_shape(2, 1, layers_per_chunk=1)
    coverage = CoverageCurves(1, 4096, 0.9)
    grid, counts = np.array(coverage.grid), np.ones(coverage.observed_LU.shape)
    rates = generator.uniform(0.2, 0.6, (*coverage.observed_LU.shape, 1))
    counts[:, 8:] = 0
    coverage.observe((1 - np.exp(-rates * grid)) * counts[..., None], counts)
    small = generator.integers(40 * 64, 250 * 64, 3).tolist()
    where = placed([0, 1, 1, 1], job)

    def prepared(longest):
        inputs = step_inputs(job, [longest, *small], tuning="raise", base_budget=6)
        return problem_of(inputs | {"coverage": coverage})

    def rank_ms(problem, budgets_LS):
        return makespans_ms(problem.micro_batch_ms(budgets_LS, where))

    def floor_ms(problem):
        return rank_ms(problem, problem.allowed.floor_LS)

    problem = prepared(300 * 64)
    low, high = floor_ms(problem)[1], rank_ms(problem, problem.allowed.top_LS)[1]
    possible = range(256 * 64, 4096 * 64)
    wanted = low + share * (high - low)
    longest = possible[bisect.bisect(possible, wanted, key=lambda g: floor_ms(prepared(g))[0])]
    problem = prepared(longest)
    costs, allowed = problem.costs, problem.allowed
    limit = floor_ms(problem)[0]
    assert low < limit < high
    tuned = tune(problem, where)
    per_pair = costs.pair_ms_L[0]
    chains = []
    for sample in (1, 2, 3):
        floor, n = int(allowed.floor_LS[0, sample]), int(costs.blocks_S[sample])
        points = sorted({floor, n, *(k for k in coverage.grid if floor < k < n)})
        length = int(costs.lengths_tokens_S[sample])
        chains.append(
            [
                (per_pair * oracle.pairs(length, k, 64), float(coverage.coverage(0, n, k)))
                for k in points
            ]
        )
    least_ms = sum(chain[0][0] for chain in chains)
    best = oracle.most_coverage(chains, limit - low + least_ms)
    reached = coverage.coverage_LS(costs.blocks_S, tuned.budgets_LS)[0, 1:].sum()
    largest = max(b[1] - a[1] for chain in chains for a, b in itertools.pairwise(chain))
    assert reached >= best - largest - 1e-9


@pytest.mark.parametrize("seed", range(4))
def test_filling_ends_early_at_budgets_that_fit(seed, monkeypatch):
    """Where effort is spent, budgets are those of the rounds so far."""
    filled = Case(seed, "raise")
    monkeypatch.setattr(budget_policies, "SHARE_OF_STEP_FOR_FILLING", 0.0)
    case = Case(seed, "raise")
    budgets_LS, allowed = case.tuned.budgets_LS, case.allowed
    assert (np.minimum(budgets_LS, allowed.top_LS) >= allowed.base_LS).all()
    assert (budgets_LS <= filled.tuned.budgets_LS).all()
    assert (budgets_LS < filled.tuned.budgets_LS).any()


def test_samples_with_pinned_budgets_are_like_no_other():
    blocks, pinned_S, job = [5, 9, 9, 4, 3, 9], [2, 3, 0, 2, 2, 0], job_shape(2, 2)
    inputs = step_inputs(job, [64 * many for many in blocks])
    problem = problem_of(inputs | {"pinned_LS": np.tile(pinned_S, (job.layers, 1))})
    sizes = Ladder.of(problem).size_S
    assert sizes[2] == sizes[5]
    assert len(set(sizes.tolist())) == 5
