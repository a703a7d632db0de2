# SPDX-License-Identifier: Apache-2.0
"""What the user asked of plans."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.layer_budgets import DENSE, base_budgets, dense_up_to_blocks
from sparsebalance_megatron.plan.job import Job


@dataclass(frozen=True, kw_only=True)
class PlanSettings:
    """The user's choices, and the limits that follow from them for a job.

    Attributes:
        config: with a number as its ``dense_up_to``.
        max_tokens_per_micro_batch: of one rank's share.
        max_cp_size: most ranks that share a micro-batch (:func:`.job.max_cp_size`).
    """

    config: SparseBalanceConfig
    max_tokens_per_micro_batch: int
    max_cp_size: int = 1

    def with_dense_length(self, tokens: int) -> "PlanSettings":
        """These settings with another length up to which documents are dense."""
        return replace(self, config=replace(self.config, dense_up_to=str(tokens)))

    @property
    def of_all_positions(self) -> "PlanSettings":
        """These settings for steps of as many micro-batches as the job."""
        return replace(self, config=replace(self.config, positions="fixed"))

    def base_L(self, layers: int) -> np.ndarray:
        """int64 base budgets of a model's layers in blocks, :data:`.DENSE` where one is dense.

        Raises:
            ConfigError: ``layer_budgets`` names a layer that the model does not have.
        """
        config = self.config
        return np.array(base_budgets(config.base_budget, config.layer_budgets, layers))

    def dense_L(self, layers: int) -> np.ndarray:
        """Mask of layers that read all visible blocks, whatever the tuning."""
        return self.base_L(layers) == DENSE

    def base_LS(self, layers: int, lengths_tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """int64 base budgets of samples in blocks: all blocks of one that is dense in a layer."""
        blocks_S = -(-np.asarray(lengths_tokens) // self.config.block_size)
        dense_LS = self.dense_LS(layers, lengths_tokens)
        return np.where(dense_LS, blocks_S, self.base_L(layers)[:, None])

    def dense_LS(self, layers: int, lengths_tokens: Sequence[int] | np.ndarray) -> np.ndarray:
        """Mask of samples that layers attend to densely, whatever the tuning."""
        blocks_S = -(-np.asarray(lengths_tokens) // self.config.block_size)
        return np.asarray(blocks_S <= self.dense_blocks_L(layers)[:, None])

    def dense_blocks_L(self, layers: int) -> np.ndarray:
        """The longest samples that layers attend to densely, in blocks."""
        config = self.config
        others = config.base_budget, config.dense_up_to_tokens, config.block_size
        base_L = self.base_L(layers).tolist()
        return np.array([dense_up_to_blocks(base, *others) for base in base_L])

    @property
    def tunes_by_latency(self) -> bool:
        """Whether budgets follow the latency of micro-batches as they are, so that neither cp_sizes
        nor segments are planned, and samples are placed by what tuning makes of a first
        placement."""
        return self.config.tuning == "anchor"

    @property
    def plans_cp_sizes(self) -> bool:
        """Whether micro-batches may differ in cp_size."""
        dynamic = self.config.context_parallel == "dynamic" and self.max_cp_size > 1
        return dynamic and self._searches

    def plans_segments(self, job: Job) -> bool:
        """Whether micro-batches of this job may pass the pipeline in segments."""
        return (
            self.config.max_segments > 1
            and self._searches
            and job.pipeline_stages > 1
            and job.virtual_stages == 1
            and job.context_parallel_size == 1
        )

    def plans_positions(self, job: Job) -> bool:
        """Whether steps of this job may have fewer positions than the job: fuller rows are more
        equal, and fewer ranks have to share a sample."""
        return (
            self.config.positions == "planned"
            and self.config.batching == "makespan"
            and (job.lockstep_ranks > 1 or self.plans_cp_sizes)
            and job.pipeline_stages == 1
        )

    @property
    def _searches(self) -> bool:
        return self.config.batching == "makespan" and not self.tunes_by_latency
