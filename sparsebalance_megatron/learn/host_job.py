# SPDX-License-Identifier: Apache-2.0
"""What a planner must know of a host: its model, its layout and the sizes of its steps."""

from __future__ import annotations

from dataclasses import dataclass

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.fit import configured_cost_model
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.plan.job import Job


@dataclass(frozen=True, kw_only=True)
class HostJob(Job):
    """One job of a host that owns its data and its loop; plain data, alike in all its processes.

    A plan chooses the number of micro-batches, and a packed sequence lies on one rank, so
    ``micro_batches`` and ``context_parallel_size`` are left out.

    Attributes:
        shape: the sizes that a layer's cost depends on.
        max_sample_tokens: the longest sample.
        global_batch_size: samples of a training step, on average.
        micro_batches_multiple_of: what the number of micro-batches divides by; the number of
            pipeline stages with virtual stages.
        pad_samples_to: tokens that the host pads every sample to a multiple of.
        recompute_all, recompute_attention: what backward computes again (Megatron's
            ``--recompute-granularity`` full, or selective with ``core_attn``).
        frozen_weights: whether the model's own weights take no gradients, as beside low-rank
            adapters (LoRA).
    """

    shape: ModelShape
    max_sample_tokens: int
    global_batch_size: int
    micro_batches_multiple_of: int = 1
    pad_samples_to: int = 1
    recompute_all: bool = False
    recompute_attention: bool = False
    frozen_weights: bool = False

    def __post_init__(self) -> None:
        for name in (
            *("data_parallel_size", "max_sample_tokens", "global_batch_size"),
            *("micro_batches_multiple_of", "pad_samples_to"),
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"host job: {name} {getattr(self, name)}: must be at least 1")
        if self.context_parallel_size > 1:
            raise ConfigError(
                f"--context-parallel-size {self.context_parallel_size}: a host's packed sequence "
                "lies on one rank; use 1"
            )

    def padded(self, tokens: int) -> int:
        """Tokens of a sample where this host packs it."""
        return -(-tokens // self.pad_samples_to) * self.pad_samples_to

    def cost_model(self, config: SparseBalanceConfig) -> CostModel:
        """The costs of this job: those of the configured table, else counted operations.

        A table's device and dtype are not looked at: a process that only plans has neither.
        """
        if config.cost_table == "auto":
            raise ConfigError(
                f"{flag_name('cost_table')} auto: a host's planner has nothing to measure; give a "
                "table of `sparse-balance profile`"
            )
        cost = configured_cost_model(config, self.shape, {})
        if self.frozen_weights:
            cost = cost.with_frozen_weights()
        return cost.with_recompute(full=self.recompute_all, attention_only=self.recompute_attention)
