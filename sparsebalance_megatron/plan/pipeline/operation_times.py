# SPDX-License-Identifier: Apache-2.0
"""The times of a step: one vector over the operations of a schedule for each rank, and its balance.

Shape legend: R data-parallel ranks or candidate pipelines.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebalance_megatron.plan.groups import Members
from sparsebalance_megatron.plan.pipeline.graph import PipelineGraph, graph_of, graph_of_order
from sparsebalance_megatron.plan.pipeline.orders import Schedule, meeting_order, segmented_order


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Ms of every operation of a schedule on every rank, and who shares operations.

    A lockstep group, whose ranks begin and end every operation together, is one rank.

    >>> from sparsebalance_megatron.plan.pipeline.orders import megatron_order
    >>> ms_2RPVM, cp_sizes_RM = np.ones((2, 1, 2, 1, 3)), np.ones((1, 3), int)
    >>> times = OperationTimes.of_micro_batches(ms_2RPVM, cp_sizes_RM, megatron_order)
    >>> times.ms_OR.shape, times.by_micro_batch_2RPVM.shape
    ((12, 1), (2, 1, 2, 1, 3))

    Attributes:
        ms_OR: equal on all ranks that share a micro-batch.
        cp_sizes_RM: how many neighbouring ranks share the micro-batch of each rank and position; 1
            where a rank runs it alone. They begin its operations together.
    """

    graph: PipelineGraph
    ms_OR: np.ndarray
    cp_sizes_RM: np.ndarray

    @classmethod
    def of_micro_batches(
        cls, times_2RPVM: np.ndarray, cp_sizes_RM: np.ndarray, schedule: Schedule
    ) -> "OperationTimes":
        """Times of micro-batches that pass the pipeline in one piece.

        Raises:
            PlanError: the schedule does not exist for their shape.
        """
        _, ranks, stages, chunks, micro_batches = times_2RPVM.shape
        flat_OR = times_2RPVM.transpose(0, 2, 3, 4, 1).reshape(-1, ranks)
        return cls(
            graph=graph_of(schedule, stages, chunks, micro_batches),
            ms_OR=np.ascontiguousarray(flat_OR),
            cp_sizes_RM=cp_sizes_RM,
        )

    @classmethod
    def of_segments(
        cls,
        segments_RM: Sequence[Sequence[int]],
        ms_2UP: np.ndarray,
        cp_sizes_RM: np.ndarray | None = None,
    ) -> "OperationTimes":
        """Times of pipelines of :class:`.SegmentedSchedule` side by side, as of one rank.

        Args:
            segments_RM: segments of each micro-batch of each pipeline.
            ms_2UP: of all segments of all pipelines, one after another.
            cp_sizes_RM: where pipelines are ranks that share micro-batches. Others may differ in
                the numbers of their micro-batches and segments.
        """
        stages = ms_2UP.shape[2]
        if cp_sizes_RM is None:
            order = segmented_order(segments_RM, stages)
        else:
            order = meeting_order(np.array(segments_RM), cp_sizes_RM, stages)
        return cls(
            graph=graph_of_order(order),
            ms_OR=np.ascontiguousarray(ms_2UP.swapaxes(1, 2)).reshape(-1, 1),
            cp_sizes_RM=np.ones((1, len(order.segments_M)), dtype=np.int64),
        )

    @cached_property
    def members(self) -> Members:
        """Which ranks share each operation, in the order in which the simulator runs them."""
        if self.cp_sizes_RM.max(initial=1) == 1:
            return Members(self.cp_sizes_RM.T)
        return Members(self.cp_sizes_RM.T[self.graph.micro_batch_O])

    @cached_property
    def by_micro_batch_2RPVM(self) -> np.ndarray:
        """[2, R, P, V, M] ms of every micro-batch that passes in one piece; read-only."""
        ms_2PVMR = self.ms_OR.reshape(*self.graph.shape_2PVM, -1)
        ms_2RMPV = np.ascontiguousarray(ms_2PVMR.transpose(0, 4, 3, 1, 2))
        ms_2RMPV.flags.writeable = False
        return ms_2RMPV.transpose(0, 1, 3, 4, 2)


def imbalance(times_ms: np.ndarray | Sequence[float]) -> float:
    """Max over mean of whatever shares the work: 1 is perfect balance.

    It is NaN where a time is missing (NaN), and 1 where nothing takes any time.
    """
    values = np.asarray(times_ms, dtype=np.float64)
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def stage_busy_ms(times_2RPVM: np.ndarray) -> np.ndarray:
    """[R, P] ms of computation per stage: the sum over its micro-batches; NaN where one is."""
    return times_2RPVM.sum(axis=0).sum(axis=(2, 3))


def rank_busy_ms(times_2RPVM: np.ndarray) -> np.ndarray:
    """[R] ms of the busiest stage of every data-parallel rank; NaN where a time is missing."""
    return stage_busy_ms(times_2RPVM).max(axis=1)


def rounded_ms(ms: float) -> float:
    """Ms rounded to nine digits, so that sums of equal times in another order tie."""
    return float(f"{ms:.8e}")
