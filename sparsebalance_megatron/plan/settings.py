# SPDX-License-Identifier: Apache-2.0
"""What the user asked of plans."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.config import (
    Batching,
    ContextParallel,
    SparseBalanceConfig,
    Tuning,
)
from sparsebalance_megatron.layer_budgets import DENSE, base_budgets, dense_up_to_blocks
from sparsebalance_megatron.plan.job import Job


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """Settings of the user; see :class:`sparsebalance_megatron.config.SparseBalanceConfig`.

    ``max_tokens_per_micro_batch``: of one rank's share. ``plan_ms``: of search; None follows the
    step.
    ``context_parallel``: whether every micro-batch has the job's context-parallel size
    (``static``), or a cp_size from the plan (``dynamic``): 1, 2, 4, ... up to
    ``max_context_parallel``. ``segment_tokens``: least of a segment. ``layer_budgets``: of the
    layers whose base budget is not ``base_budget``. ``dense_up_to_tokens``: documents that layers
    at ``base_budget`` attend to densely. ``plans_positions``: whether steps may have
    fewer micro-batches than the job, where that is possible (:meth:`plans_positions_of`).
    """

    batching: Batching
    tuning: Tuning
    coverage_threshold: float
    base_budget: int
    block_size: int
    max_tokens_per_micro_batch: int
    plan_ms: float | None = None
    context_parallel: ContextParallel = "static"
    max_context_parallel: int = 1
    max_segments: int = 1
    segment_tokens: int = 1
    layer_budgets: str | None = None
    dense_up_to_tokens: int = 0
    plans_positions: bool = False

    def base_L(self, layers: int) -> np.ndarray:
        """int64 base budgets of a model's layers in blocks, :data:`.DENSE` where one is dense.

        Raises:
            ConfigError: ``layer_budgets`` names a layer that the model does not have.
        """
        return np.array(base_budgets(self.base_budget, self.layer_budgets, layers))

    def dense_L(self, layers: int) -> np.ndarray:
        """Mask of layers that read all visible blocks, whatever the tuning."""
        return self.base_L(layers) == DENSE

    def base_LS(self, layers: int, lengths_tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 base budgets of samples in blocks: all blocks of one that is dense in a layer."""
        blocks_S = -(-np.asarray(lengths_tokens) // self.block_size)
        dense_LS = self.dense_LS(layers, lengths_tokens)
        return np.where(dense_LS, blocks_S, self.base_L(layers)[:, None])

    def dense_LS(self, layers: int, lengths_tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Mask of samples that layers attend to densely, whatever the tuning."""
        blocks_S = -(-np.asarray(lengths_tokens) // self.block_size)
        return np.asarray(blocks_S <= self.dense_blocks_L(layers)[:, None])

    def dense_blocks_L(self, layers: int) -> np.ndarray:
        """The longest samples that layers attend to densely, in blocks."""
        others = self.base_budget, self.dense_up_to_tokens, self.block_size
        base_L = self.base_L(layers).tolist()
        return np.array([dense_up_to_blocks(base, *others) for base in base_L])

    def plans_positions_of(self, job: Job) -> bool:
        """Whether steps of this job may have fewer positions than the job: fuller rows are more
        equal, and fewer ranks have to share a sample."""
        plans_cp_sizes = self.context_parallel == "dynamic" and self.max_context_parallel > 1
        return (
            self.plans_positions
            and self.batching == "makespan"
            and (job.lockstep_ranks > 1 or plans_cp_sizes)
            and job.pipeline_stages == 1
        )

    @classmethod
    def from_config(
        cls,
        config: SparseBalanceConfig,
        max_tokens_per_micro_batch: int,
        max_context_parallel: int = 1,
    ) -> PlanSettings:
        """The choices of a configuration, with the cap and the largest cp_size of this job."""
        return cls(
            batching=config.batching,
            tuning=config.tuning,
            coverage_threshold=config.coverage_threshold,
            base_budget=config.base_budget,
            layer_budgets=config.layer_budgets,
            dense_up_to_tokens=config.dense_up_to_tokens,
            block_size=config.block_size,
            max_tokens_per_micro_batch=max_tokens_per_micro_batch,
            plan_ms=config.plan_ms,
            context_parallel=config.context_parallel,
            max_context_parallel=max_context_parallel,
            max_segments=config.max_segments,
            segment_tokens=config.segment_tokens,
            plans_positions=config.positions == "planned",
        )
