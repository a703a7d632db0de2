# SPDX-License-Identifier: Apache-2.0
"""Order of arrival and balance: every sample once, under the cap, and as even as can be.

Rows of equal height are compared with all ways to put a few samples into bins.
"""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import random_lengths

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.search.balance import _pack, arrival, balanced, packed_rows

NO_CAP = 1 << 40


def job(ranks, micro_batches):
    return Job(data_parallel_size=ranks, micro_batches=micro_batches, stage_layers=(((0,),),))


def check(placement, lengths, shape, cap):
    assert len(placement) == shape.data_parallel_size
    assert all(len(rank) == shape.micro_batches for rank in placement)
    micro_batches = [micro_batch for rank in placement for micro_batch in rank]
    assert all(micro_batches), "a position is empty"
    assert sorted(sample for micro_batch in micro_batches for sample in micro_batch) == list(
        range(len(lengths))
    )
    assert all(sum(lengths[sample] for sample in each) <= cap for each in micro_batches)


def test_arrival_is_megatrons_order():
    shape = job(2, 3)
    assert arrival([1] * 12, shape, 2) == (((0, 1), (4, 5), (8, 9)), ((2, 3), (6, 7), (10, 11)))
    samplers = pytest.importorskip("megatron.training.datasets.data_samplers")
    for rank in range(2):
        sampler = samplers.MegatronPretrainingSampler(12, 0, 2, rank, 2)
        assert tuple(map(tuple, sampler)) == arrival([1] * 12, shape, 2)[rank]


def test_arrival_errors():
    with pytest.raises(PlanError, match="7 samples do not divide over 6"):
        arrival([1] * 7, job(2, 3), 5)
    with pytest.raises(PlanError, match=r"rank 1, micro-batch 0 has 9 tokens.*-batch to 9"):
        arrival([1, 1, 4, 5], job(2, 1), 8)
    with pytest.raises(PlanError, match="3 samples cannot fill 4"):
        arrival([1] * 3, job(2, 2), 8)
    with pytest.raises(PlanError, match=r"sample 2 has 9 tokens.*to 9"):
        arrival([1, 1, 9, 5], job(2, 1), 8)


@settings(max_examples=120)
@given(
    st.integers(1, 4),
    st.integers(1, 4),
    st.integers(1, 3),
    st.sampled_from(["spread", "equal", "long", "tiny"]),
    st.integers(0, 2**32 - 1),
)
def test_balanced_invariants(ranks, micro_batches, size, kind, seed):
    shape = job(ranks, micro_batches)
    lengths = random_lengths(shape.places * size, seed, kind=kind)
    weights = np.array(lengths) * np.random.default_rng(seed).uniform(0.5, 2.0, len(lengths))
    longest = max(lengths)
    for cap in (NO_CAP, longest * size):
        placement = balanced(weights, lengths, shape, cap)
        check(placement, lengths, shape, cap)
        assert placement == balanced(weights, lengths, shape, cap)


@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 3))
def test_barely_fitting_caps_fit_or_name_a_cap_that_does(seed, micro_batches, size):
    generator = np.random.default_rng(seed)
    cuts = [
        generator.multinomial(1000 - size, np.full(size, 1 / size)) + 1
        for _ in range(micro_batches)
    ]
    lengths = generator.permutation(np.concatenate(cuts)).tolist()
    shape = job(1, micro_batches)
    try:
        check(balanced(np.array(lengths), lengths, shape, 1000), lengths, shape, 1000)
    except PlanError as error:
        enough = int(str(error).split("per-micro-batch ")[1].split()[0])
        check(balanced(np.array(lengths), lengths, shape, enough), lengths, shape, enough)


def test_cap_beats_balance():
    lengths, weights = [60, 40, 50, 50], np.array([1.0, 1.0, 9.0, 9.0])
    placement = balanced(weights, lengths, job(1, 2), 100)
    check(placement, lengths, job(1, 2), 100)
    with pytest.raises(PlanError, match=r"not fit into 2 micro-batches of 99 tokens; .* 100 would"):
        balanced(weights, lengths, job(1, 2), 99)


@settings(max_examples=100)
@given(st.integers(0, 2**32 - 1), st.integers(2, 6), st.integers(1, 3), st.floats(1.0, 2.0))
def test_micro_batches_are_packed_as_by_hand(seed, bins, minimum, room):
    """Whatever is heaviest goes where least is, counted by slowness, among bins with room for it.

    Once only the bins that lack something can still be given enough, only they are filled.
    """
    generator = np.random.default_rng(seed)
    items = bins * minimum + int(generator.integers(0, 3 * bins))
    weights, tokens = generator.permutation(1000)[:items] + 0.5, generator.integers(1, 20, items)
    slowness = generator.uniform(0.5, 2.0, bins)
    capacity = max(int(tokens.max()), int(room * tokens.sum() / bins))
    lists = (each.tolist() for each in (weights, tokens, slowness))
    found = _pack(range(items), *lists, capacity, minimum)
    members = [[] for _ in range(bins)]
    for placed, item in enumerate(np.argsort(-weights).tolist()):
        lacking = [max(minimum - len(each), 0) for each in members]
        only_lacking = items - placed <= sum(lacking)
        fitting = [
            (slow * weights[each].sum(), index)
            for index, (each, slow) in enumerate(zip(members, slowness, strict=True))
            if tokens[each].sum() + tokens[item] <= capacity
            and (lacking[index] or not only_lacking)
        ]
        if not fitting:
            assert found is None
            return
        members[min(fitting)[1]].append(item)
    assert found == members


SEEDS = st.integers(0, 2**32 - 1)


def drawn(samples, seed):
    """Weights that grow with the square of the lengths, and the lengths."""
    generator = np.random.default_rng(seed)
    tokens_S = np.exp(generator.uniform(0, 5, samples)).astype(int) + 1
    return tokens_S * (1.0 + tokens_S / 20), tokens_S


def least_heights(weights_S, rows, members):
    """The least sum of heights of all assignments without an empty bin; None where there is
    none."""
    best = None
    for bins in product(range(rows * members), repeat=len(weights_S)):
        load_J = np.bincount(bins, weights_S, rows * members)
        if load_J.min() == 0.0:
            continue
        height = load_J.reshape(rows, members).max(axis=1).sum()
        best = height if best is None else min(best, height)
    return best


def heights(rows, weights_S):
    """The weight of every row's first bin, which is the fullest."""
    loads = [[weights_S[list(samples)].sum() for samples in row] for row in rows]
    assert all(row == sorted(row, reverse=True) for row in loads)
    return [row[0] for row in loads]


@pytest.mark.parametrize("shape", [(1, 2), (2, 2), (1, 3), (3, 1), (1, 4)])
@pytest.mark.parametrize("more", [0, 1, 2])
def test_the_sum_of_heights_is_near_the_least(shape, more):
    """The search starts here; one sample a bin has the least at once."""
    rows, members = shape
    ratios = []
    for seed in range(20):
        weights_S, tokens_S = drawn(rows * members + more, seed)
        packings = packed_rows(weights_S, tokens_S, rows, members, 1 << 40)
        least = least_heights(weights_S, rows, members)
        ratios.append(min(sum(heights(each, weights_S)) for each in packings) / least)
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) <= (1.06 if more else 1 + 1e-12)


@given(
    SEEDS, st.integers(1, 60), st.integers(1, 5), st.integers(1, 8), st.floats(0.3, 3.0), st.data()
)
def test_every_sample_has_one_bin_under_the_cap_and_no_bin_is_empty(
    seed, samples, rows, members, room, data
):
    weights_S, tokens_S = drawn(samples, seed)
    mean_tokens = tokens_S.sum() / (rows * members)
    cap_tokens = max(1, int(room * mean_tokens) + data.draw(st.integers(0, 150)))
    floors_X = data.draw(st.sampled_from((None, np.linspace(2.0, 0.5, rows) * mean_tokens)))
    packings = packed_rows(weights_S, tokens_S, rows, members, cap_tokens, floors_X)
    if samples < rows * members or tokens_S.max() > cap_tokens:
        assert not packings
    for packing in packings:
        check(packing, tokens_S, job(rows, members), cap_tokens)


def test_rows_are_filled_up_to_their_floors():
    weights_S, tokens_S = np.full(2 * 12, 1.0), np.ones(2 * 12, dtype=np.int64)
    floors_X = np.array([6.0, 4.0, 2.0])
    for packing in packed_rows(weights_S, tokens_S, 3, 2, 1 << 40, floors_X):
        assert heights(packing, weights_S) == floors_X.tolist()


def test_samples_that_a_cap_keeps_apart_are_apart():
    weights_S, tokens_S = np.array([9.0, 8.0, 1.0, 1.0]), np.array([60, 50, 50, 40])
    for packing in packed_rows(weights_S, tokens_S, 1, 2, 100):
        assert sorted(map(sorted, packing[0])) == [[0, 3], [1, 2]]
    assert packed_rows(weights_S, tokens_S, 1, 2, 99) == []
