# SPDX-License-Identifier: Apache-2.0
"""Reads and packs one rank's rows on a thread, while the model computes."""

from __future__ import annotations

from concurrent.futures import Executor, Future
from threading import Lock

from sparsebalance_megatron.data.packing import PackedRow
from sparsebalance_megatron.data.sample_order import Samples
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan
from sparsebalance_megatron.training.rows import RowPacking


class RowReader:
    """Rows of one rank, in the order in which they will be asked for.

    At most two steps' rows are in memory: of the one that runs and of the one after it.

    Args:
        data_parallel_rank: whose slots to read.
        packing: how slots become rows, of which only this rank's share is kept.
        worker: reads; one thread keeps the order.
    """

    def __init__(
        self,
        index: Samples,
        *,
        data_parallel_rank: int,
        packing: RowPacking,
        worker: Executor,
    ) -> None:
        self._index = index
        self._data_parallel_rank = data_parallel_rank
        self._packing = packing
        self._worker = worker
        self._lock = Lock()
        self._latest: StepPlan | None = None
        self._rows: dict[tuple[int, int], Future[PackedRow]] = {}

    def begin(self, planned: PlannedStep) -> None:
        """Start on a step's rows, unless they were the last to be started. From any thread."""
        with self._lock:
            plan = planned.plan
            if plan is self._latest:
                return
            self._latest = plan
            for place in [known for known in self._rows if known[0] < plan.step - 1]:
                self._rows.pop(place).cancel()
            slots = plan.for_rank(self._data_parallel_rank).micro_batches
            for position, slot in enumerate(slots):
                try:
                    row = self._worker.submit(self._read, planned, slot)
                except RuntimeError:
                    # The process ends: executors take nothing more, and nobody will ask.
                    return
                self._rows[plan.step, position] = row

    def row(self, planned: PlannedStep, position: int) -> PackedRow:
        """One row; waits for it. Read on the spot if it was not begun, or was taken before.

        Raises:
            OSError, DataError: whatever reading it raised.
        """
        with self._lock:
            row = self._rows.pop((planned.plan.step, position), None)
        if row is not None:
            return row.result()
        slots = planned.plan.for_rank(self._data_parallel_rank).micro_batches
        return self._read(planned, slots[position])

    def _read(self, planned: PlannedStep, slot: MicroBatchPlan) -> PackedRow:
        samples = [self._index.read(int(planned.samples[i])) for i in slot.samples]
        return self._packing.row(slot, samples)
