# SPDX-License-Identifier: Apache-2.0
"""Where others would place samples: every sample once, within what ranks hold, by their rules."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.others import dynamic_context_parallel, sorted_batches

CAP = 1000


def job_of(ranks: int, micro_batches: int = 1, cp_size: int = 1) -> Job:
    job = Job.even(layers=2, ranks=ranks, stages=1, micro_batches=micro_batches)
    return replace(job, context_parallel_size=cp_size)


@given(st.lists(st.integers(1, 6 * CAP), min_size=1, max_size=40), st.sampled_from([6, 8, 16]))
def test_dynamic_context_parallelism_fills_every_rank(lengths: list[int], ranks: int) -> None:
    where = dynamic_context_parallel(lengths, job_of(ranks), CAP)
    held = [samples for rank in where.samples for samples in rank if samples]
    assert sorted(itertools.chain.from_iterable(held)) == list(range(len(lengths)))
    assert (where.cp_sizes_RM >= 1).all()
    for rank, position in np.ndindex(where.cp_sizes_RM.shape):
        if samples := where.samples[rank][position]:
            size = int(where.cp_sizes_RM[rank, position])
            assert rank % size == 0 or size == ranks
            assert sum(lengths[sample] for sample in samples) <= size * CAP
    longest = [max(lengths[s] for s in rank[0]) for rank in where.samples if rank[0]]
    assert max(longest) == max(lengths), "the longest sample is in the first position"


def test_dynamic_context_parallelism_by_hand() -> None:
    """4,000 tokens need four ranks; 2,000 take two and 1,000 one each; the rest wait."""
    where = dynamic_context_parallel([1000, 4000, 2000, 1000, 900, 500], job_of(8), CAP)
    assert [rank[0] for rank in where.samples] == [(1,), (), (), (), (2,), (), (0,), (3,)]
    assert where.cp_sizes_RM[:, 0].tolist() == [4, 4, 4, 4, 2, 2, 1, 1]
    # What waits takes four ranks each, where its work is least.
    assert where.cp_sizes_RM[:, 1].tolist() == [4] * 8
    with pytest.raises(PlanError, match="8001 tokens exceed 8 ranks of 1000"):
        dynamic_context_parallel([8001], job_of(8), CAP)


@given(st.lists(st.integers(1, 9000), min_size=24, max_size=24), st.sampled_from([1, 2]))
def test_sorted_batches_are_equal_in_number(lengths: list[int], cp_size: int) -> None:
    placement = sorted_batches(lengths, job_of(4 * cp_size, 3, cp_size), CAP)
    assert [[len(samples) for samples in rank] for rank in placement] == [[2] * 3] * 4
    flat = itertools.chain.from_iterable(itertools.chain.from_iterable(placement))
    assert sorted(flat) == list(range(24))
    work = [[sum(lengths[s] ** 2 for s in samples) for samples in rank] for rank in placement]
    assert all(of_rank == sorted(of_rank, reverse=True) for of_rank in work)


def test_sorted_batches_by_hand() -> None:
    """Squares of 8, 7, 6, 5 of two ranks: 64 + 25 and 49 + 36."""
    (one,), (other,) = sorted_batches([8, 7, 6, 5], job_of(2), CAP)
    assert {one, other} == {(0, 3), (1, 2)}
    with pytest.raises(PlanError, match="5 samples do not divide over 2 micro-batches"):
        sorted_batches([8, 7, 6, 5, 4], job_of(2), CAP)
