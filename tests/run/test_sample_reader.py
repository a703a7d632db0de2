# SPDX-License-Identifier: Apache-2.0
"""Rows read ahead are the rows that the plan asks for, whoever reads them when."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from learn.scheduler_cases import BLOCK_TOKENS, scheduler
from learn.scheduler_cases import index as index  # a fixture

from sparsebalance_megatron.data.packing import PackedSequence
from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.scheduler import BatchSizes, Scheduler
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
        batch_sizes=BatchSizes.constant(8),
        worker=worker,
    )


def assert_holds(
    row: PackedSequence, index: SampleIndex, planned: PlannedStep, micro_batch: Any
) -> None:
    ends = np.cumsum(micro_batch.lengths_tokens)
    for number, begin, end in zip(micro_batch.samples, [0, *ends], ends, strict=False):
        sample = index.read(int(planned.samples[number]))
        assert np.array_equal(row.tokens[begin:end], sample.tokens[:-1])
        assert np.array_equal(row.labels[begin:end], sample.tokens[1:])


@pytest.mark.parametrize("ahead", [True, False])
def test_every_row_is_that_of_its_micro_batch(
    index: SampleIndex, planner: Executor, ahead: bool
) -> None:
    schedule = scheduler(index, planner if ahead else None)
    with ThreadPoolExecutor(1) as worker:
        micro_batches = iterator_of(schedule, index, worker)
        for step in range(4):
            planned = schedule.planned(step)
            for micro_batch in planned.plan.for_rank(1).micro_batches:
                read = next(micro_batches)
                assert (read.step, read.position) == (step, micro_batch.position)
                assert_holds(PackedSequence(**read.inputs), index, planned, micro_batch)
                assert read.layout.cu_seqlens[-1] == len(read.inputs["tokens"])
                schedule.plan_following(step)


def test_the_next_steps_samples_are_read_before_they_are_asked_for(
    index: SampleIndex, planner: Executor
) -> None:
    schedule, worker = scheduler(index, planner), CountingExecutor()
    micro_batches = len(schedule.planned(0).plan.for_rank(1).micro_batches)
    next(iterator_of(schedule, index, worker))
    assert worker.submitted == micro_batches
    schedule.plan_following(0)
    planner.submit(lambda: None).result(timeout=WAIT_S)  # what the planner had to do is done
    assert worker.submitted == 2 * micro_batches


def test_samples_are_read_once_and_kept_for_two_steps(index: SampleIndex) -> None:
    schedule, worker = scheduler(index, None), CountingExecutor()
    reader = iterator_of(schedule, index, worker)
    for step in range(5):
        reader.read_ahead(schedule.planned(step))
        reader.read_ahead(schedule.planned(step))
    micro_batches = len(schedule.planned(4).plan.for_rank(1).micro_batches)
    assert worker.submitted == 5 * micro_batches
    assert len(reader._packed) == 2 * micro_batches


def test_a_row_asked_for_again_is_read_again(index: SampleIndex) -> None:
    schedule = scheduler(index, None)
    planned = schedule.planned(0)
    reader = iterator_of(schedule, index, CountingExecutor())
    reader.read_ahead(planned)
    (first,), (again,) = reader.packed(planned, 0), reader.packed(planned, 0)
    assert first is not again
    assert np.array_equal(first.tokens, again.tokens)


def test_what_reading_raises_is_raised_where_the_row_is_needed(
    index: SampleIndex, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = scheduler(index, None)
    planned = schedule.planned(0)
    with ThreadPoolExecutor(1) as worker:
        reader = iterator_of(schedule, index, worker)
        monkeypatch.setattr(index, "read", _fail)
        reader.read_ahead(planned)
        with pytest.raises(OSError, match="stale file handle"):
            reader.packed(planned, 0)


def test_a_chunk_that_reads_no_tokens_gets_none(index: SampleIndex) -> None:
    assert next(iterator_of(scheduler(index, None), None, CountingExecutor())).inputs is None


def _fail(_: int) -> Any:
    raise OSError("stale file handle")
