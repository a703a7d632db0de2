# SPDX-License-Identifier: Apache-2.0
"""Packed sequences: what their ranks compute, and that those read ahead are the plan's."""

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from learn.scheduler_cases import BLOCK_TOKENS, make_scheduler
from learn.scheduler_cases import index as index  # a fixture

from sparsebalance_megatron.attention.sequence.slice import SequenceGroup
from sparsebalance_megatron.data.packing import PackedSequence, Sample
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.megatron.sequence_groups import SequenceGroups
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan
from sparsebalance_megatron.run.micro_batches import MicroBatchIterator, SequencePacking

WAIT_S = 30


class CountingExecutor(Executor):
    """Reads at once, and counts."""

    def __init__(self) -> None:
        self.submitted = 0

    def submit(self, function: Any, /, *arguments: Any, **keywords: Any) -> Future:
        self.submitted += 1
        done: Future = Future()
        try:
            done.set_result(function(*arguments, **keywords))
        except OSError as error:
            done.set_exception(error)
        return done


@pytest.fixture
def planner() -> Iterator[Executor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


PACKING = SequencePacking(block_size=BLOCK_TOKENS, pad_to_multiple_of=16)


def iterator_of(
    schedule: Scheduler, index: SampleIndex | None, worker: Executor, rank: int = 1
) -> MicroBatchIterator:
    return MicroBatchIterator(
        schedule,
        index,
        PACKING,
        device=torch.device("cpu"),
        data_parallel_rank=rank,
        chunk=0,
        training=True,
        step=0,
        worker=worker,
    )


@pytest.mark.parametrize("ahead", [True, False])
def test_every_row_is_that_of_its_micro_batch(
    index: SampleIndex, planner: Executor, ahead: bool
) -> None:
    schedule = make_scheduler(index, planner if ahead else None)
    with ThreadPoolExecutor(1) as worker:
        micro_batches = iterator_of(schedule, index, worker)
        for step in range(4):
            planned = schedule.planned(step)
            for micro_batch in planned.plan.for_rank(1).micro_batches:
                read = next(micro_batches)
                assert (read.step, read.position) == (step, micro_batch.position)
                ends = np.cumsum(micro_batch.lengths_tokens)
                for number, begin, end in zip(micro_batch.samples, [0, *ends], ends, strict=False):
                    sample = index.read(int(planned.samples[number]))
                    assert np.array_equal(read.inputs["tokens"][begin:end], sample.tokens[:-1])
                    assert np.array_equal(read.inputs["labels"][begin:end], sample.tokens[1:])
                assert read.layout.cu_seqlens[-1] == len(read.inputs["tokens"])
                schedule.plan_following(step)


def test_the_next_steps_samples_are_read_before_they_are_asked_for(
    index: SampleIndex, planner: Executor
) -> None:
    schedule, worker = make_scheduler(index, planner), CountingExecutor()
    micro_batches = len(schedule.planned(0).plan.for_rank(1).micro_batches)
    next(iterator_of(schedule, index, worker))
    assert worker.submitted == micro_batches
    schedule.plan_following(0)
    planner.submit(lambda: None).result(timeout=WAIT_S)  # what the planner had to do is done
    assert worker.submitted == 2 * micro_batches


def test_samples_are_read_once_and_kept_for_two_steps(index: SampleIndex) -> None:
    schedule, worker = make_scheduler(index), CountingExecutor()
    reader = iterator_of(schedule, index, worker)
    for step in range(5):
        reader.read_ahead(schedule.planned(step))
        reader.read_ahead(schedule.planned(step))
    micro_batches = len(schedule.planned(4).plan.for_rank(1).micro_batches)
    assert worker.submitted == 5 * micro_batches
    assert len(reader._packed) == 2 * micro_batches


def test_a_row_asked_for_again_is_read_again(index: SampleIndex) -> None:
    schedule = make_scheduler(index)
    planned = schedule.planned(0)
    reader = iterator_of(schedule, index, CountingExecutor())
    reader.read_ahead(planned)
    (first,), (again,) = reader.packed(planned, 0), reader.packed(planned, 0)
    assert first is not again
    assert np.array_equal(first.tokens, again.tokens)


def test_what_reading_raises_is_raised_where_the_row_is_needed(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = make_scheduler(index)
    planned = schedule.planned(0)
    with ThreadPoolExecutor(1) as worker:
        reader = iterator_of(schedule, index, worker)
        monkeypatch.setattr(index, "read", Mock(side_effect=OSError("stale file handle")))
        reader.read_ahead(planned)
        with pytest.raises(OSError, match="stale file handle"):
            reader.packed(planned, 0)


def test_a_chunk_that_reads_no_tokens_gets_none(index: SampleIndex) -> None:
    assert next(iterator_of(make_scheduler(index), None, CountingExecutor())).inputs is None


BLOCK_TOKENS = 4
NO_GROUP: Any = None


def groups(rank: int, most_ranks: int) -> SequenceGroups:
    """Those of one rank, without processes."""
    cp_sizes = [1 << power for power in range(most_ranks.bit_length())]
    return SequenceGroups(
        rank=rank,
        by_size={
            cp_size: SequenceGroup(member=rank % cp_size, members=cp_size) for cp_size in cp_sizes
        },
        agreement=NO_GROUP,
    )


def micro_batch(
    lengths: list[int],
    rank: int = 0,
    cp_size: int = 1,
    segment_starts_blocks: tuple[int, ...] = (0,),
) -> MicroBatchPlan:
    return MicroBatchPlan(
        samples=tuple(range(len(lengths))),
        lengths_tokens=tuple(lengths),
        budgets_LS=np.ones((1, len(lengths)), dtype=np.int32),
        rank=rank,
        position=3,
        cp_size=cp_size,
        segment_starts_blocks=segment_starts_blocks,
    )


def samples(lengths: list[int]) -> list[Sample]:
    """Tokens that say where they are from; every third label is masked."""
    return [
        Sample(
            tokens=1000 * (number + 1) + np.arange(length + 1),
            loss_mask=(np.arange(length) % 3 > 0).astype(np.float32),
        )
        for number, length in enumerate(lengths)
    ]


def slices(
    lengths: list[int], cp_size: int, multiple: int, segment_starts_blocks: tuple[int, ...] = (0,)
) -> list[tuple[Any, PackedSequence]]:
    """Every member's slices and rows, on ranks that begin at twice the cp_size."""
    found = []
    for rank in range(2 * cp_size, 3 * cp_size):
        packing = SequencePacking(
            block_size=BLOCK_TOKENS, pad_to_multiple_of=multiple, groups=groups(rank, 8)
        )
        plan = micro_batch(lengths, 2 * cp_size, cp_size, segment_starts_blocks)
        rows = packing.packed(plan, samples(lengths))
        assert packing.computed_tokens(plan) == [len(row.tokens) for row in rows]
        found += zip(packing.slices(plan), rows, strict=True)
    return found


@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=5),
    cp_size=st.sampled_from([1, 2, 4, 8]),
    multiple=st.sampled_from([1, 2, 4]),
    further=st.lists(st.integers(0, 2), max_size=3),
)
def test_members_compute_the_row_once_and_padding_that_counts(
    lengths: list[int], cp_size: int, multiple: int, further: list[int]
) -> None:
    """Also in segments, of as many blocks as there are members and some more."""
    blocks = sum(-(-length // BLOCK_TOKENS) for length in lengths)
    firsts = np.cumsum([0, *(cp_size + more for more in further)])
    segment_starts_blocks = tuple(firsts[firsts + cp_size <= max(blocks, cp_size)].tolist())
    expected = {
        (1000 * (number + 1) + at, 1000 * (number + 1) + at + 1, at, float(at % 3 > 0))
        for number, length in enumerate(lengths)
        for at in range(length)
    }
    found, padded = [], 0
    for held, row in slices(lengths, cp_size, multiple, segment_starts_blocks):
        assert len(row.tokens) % multiple == 0
        assert len(row.tokens) == len(held.tokens_T) + held.padding_tokens > 0
        assert row.position_ids.tolist() == held.positions_T.tolist()
        columns = (row.tokens, row.labels, row.position_ids, row.loss_mask)
        rows = [entry for entry in zip(*(x.tolist() for x in columns), strict=True)]
        real = [entry for entry in rows if entry[0]]
        padded += len(rows) - len(real)
        assert all(entry == (0, 0, 0, 0.0) for entry in rows if not entry[0])
        found += real
    assert len(found) == len(expected)
    assert set(found) == expected
    packing = SequencePacking(
        block_size=BLOCK_TOKENS, pad_to_multiple_of=multiple, groups=groups(0, 8)
    )
    plan = micro_batch(lengths, cp_size=cp_size, segment_starts_blocks=segment_starts_blocks)
    assert packing.padded_tokens(plan) == padded


def test_rows_of_a_run_that_shares_none_are_padded_as_a_whole() -> None:
    packing = SequencePacking(block_size=BLOCK_TOKENS, pad_to_multiple_of=4)
    plan = micro_batch([5, 2])
    assert packing.slices(plan) == [None]
    assert packing.cu_seqlens(plan) == (0, 5, 7, 8)
    (row,) = packing.packed(plan, samples([5, 2]))
    assert row.position_ids.tolist() == [0, 1, 2, 3, 4, 0, 1, 0]


@pytest.mark.parametrize(("rank", "cp_size"), [(0, 8), (1, 2)])
def test_a_micro_batch_of_ranks_without_a_group_is_refused(rank: int, cp_size: int) -> None:
    packing = SequencePacking(block_size=BLOCK_TOKENS, groups=groups(1, 4))
    with pytest.raises(PlanError, match=f"ranks {rank} to {rank + cp_size - 1}: groups of 1, 2"):
        packing.slices(micro_batch([40], rank=rank, cp_size=cp_size))
