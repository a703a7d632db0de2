# SPDX-License-Identifier: Apache-2.0
"""Times of a step as one flat vector over the operations of its schedule, for every rank.

Shape legend: R data-parallel ranks or candidate pipelines, P pipeline stages, V virtual stages
(chunks per stage), M micro-batches, O operations in the numbering of :class:`.PipelineGraph`,
I some of them; a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.plan.context_groups import Members
from sparsebalance_megatron.plan.pipeline.orders import Schedule, megatron_order
from sparsebalance_megatron.plan.pipeline.pipeline_graph import PipelineGraph, graph_of
from sparsebalance_megatron.plan.plan_error import PlanError


@dataclass(frozen=True, kw_only=True)
class OperationTimes:
    """Ms of every operation of a schedule on every rank.

    ``ms_OR``: equal on all ranks that share a micro-batch. ``cp_sizes_RM``: how many neighbouring
    ranks share the micro-batch of each rank and position; 1 where a rank runs it alone.

    >>> times = OperationTimes.of_micro_batches(np.ones((2, 1, 2, 1, 3)), np.ones((1, 3), int))
    >>> times.where(stage=1, micro_batch=0).shape
    (2, 1)
    """

    graph: PipelineGraph
    ms_OR: np.ndarray
    cp_sizes_RM: np.ndarray

    @classmethod
    def of_micro_batches(
        cls,
        times_2RPVM: np.ndarray,
        cp_sizes_RM: np.ndarray,
        schedule: Schedule = megatron_order,
    ) -> OperationTimes:
        """Times of micro-batches that pass the pipeline in one piece.

        Raises:
            PlanError: the times have another shape, or the schedule does not exist for it.
        """
        if times_2RPVM.ndim != 5 or len(times_2RPVM) != 2:
            raise PlanError(
                f"times have shape {times_2RPVM.shape}, expected "
                "[2, ranks, stages, chunks, micro-batches]"
            )
        _, ranks, stages, chunks, micro_batches = times_2RPVM.shape
        graph = graph_of(schedule, stages, chunks, micro_batches)
        flat_OR = times_2RPVM.transpose(0, 2, 3, 4, 1).reshape(-1, ranks)
        if len(flat_OR) != len(graph.operations):
            raise PlanError(
                f"schedule has {len(graph.operations)} operations, times are of {len(flat_OR)}"
            )
        return cls(graph=graph, ms_OR=np.ascontiguousarray(flat_OR), cp_sizes_RM=cp_sizes_RM)

    @cached_property
    def members(self) -> Members:
        """Which ranks share each operation, in the order in which the simulator runs them."""
        if self.cp_sizes_RM.max(initial=1) == 1:
            return Members(self.cp_sizes_RM.T)
        return Members(self.cp_sizes_RM.T[self.graph.micro_batch_O[self.graph.run_O]])

    def rank(self, rank: int) -> OperationTimes:
        """The times of one rank by itself."""
        return replace(
            self,
            ms_OR=self.ms_OR[:, [rank]],
            cp_sizes_RM=np.ones_like(self.cp_sizes_RM[[rank]]),
        )

    def where(
        self,
        *,
        direction: Direction | None = None,
        stage: int | None = None,
        chunk: int | None = None,
        micro_batch: int | None = None,
        segment: int | None = None,
    ) -> np.ndarray:
        """[I, R] ms of the operations with these coordinates; None stands for all."""
        graph = self.graph
        chosen_O = np.ones(len(graph.operations), dtype=bool)
        if direction is not None:
            chosen_O &= graph.backward_O == (direction is Direction.BACKWARD)
        for wanted, found_O in (
            (stage, graph.stage_O),
            (chunk, graph.chunk_O),
            (micro_batch, graph.micro_batch_O),
            (segment, graph.segment_O),
        ):
            if wanted is not None:
                chosen_O &= found_O == wanted
        return self.ms_OR[chosen_O]

    @cached_property
    def by_micro_batch_2RPVM(self) -> np.ndarray:
        """[2, R, P, V, M] ms of every micro-batch: the sum of its segments; read-only."""
        graph = self.graph
        ms_OR = np.add.reduceat(self.ms_OR, graph.first_segment_I, axis=0)
        ms_2PVMR = ms_OR.reshape(*graph.shape_2PVM, -1)
        ms_2RMPV = np.ascontiguousarray(ms_2PVMR.transpose(0, 4, 3, 1, 2))
        ms_2RMPV.flags.writeable = False
        return ms_2RMPV.transpose(0, 1, 3, 4, 2)
