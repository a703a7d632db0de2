# SPDX-License-Identifier: Apache-2.0
"""A job to predict, as commands describe it, and the named setups; two are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.cost.experts import RANKS_PER_NODE
from sparsebalance_megatron.cost.memory import MemoryModel
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.rates import Efficiency
from sparsebalance_megatron.plan.job import (
    Job,
    check_cp_sizes,
    check_sharded_parameters,
    default_max_cp_size,
)
from sparsebalance_megatron.plan.settings import PlanSettings
from sparsebalance_megatron.predict.lengths import (
    GENERATORS,
    MAX_TOKENS,
    WorkloadError,
    batches_of,
)
from sparsebalance_megatron.predict.models import MODELS, ModelPreset, counted_cost
from sparsebalance_megatron.predict.workload import Workload, prior_coverage
from sparsebalance_megatron.selector_registry import check_whole_documents

Recompute = Literal["none", "attention", "full"]


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A training job to predict: model, layout, batch, and how attention is planned.

    Memory is that of ``--sequence-parallel`` and ``--use-distributed-optimizer``.

    Attributes:
        ranks: data-parallel times context-parallel.
        micro_batches: positions of a rank, as Megatron counts them.
        config: of the plugin.
        max_context_parallel: ranks that may share a micro-batch; None stands for a node's.
        cap_tokens: of a rank's share of a micro-batch.
        longest_tokens: the longest sample that coverage is known of.
        efficiency: at which operations are counted; None takes the selection's.
        measured: costs of a table, in place of counted ones.
        expert_parallel_size: ranks that divide the routed experts.
        sharded_parameters: whether all ranks share weights, as with fully sharded data parallelism.
        lockstep_ranks: at least as many ranks wait for one another in every layer.
    """

    model: ModelPreset
    ranks: int
    stages: int
    micro_batches: int
    cap_tokens: int
    longest_tokens: int
    config: SparseBalanceConfig
    tensor_parallel_size: int = 1
    context_parallel_size: int = 1
    max_context_parallel: int | None = None
    expert_parallel_size: int = 1
    sharded_parameters: bool = False
    lockstep_ranks: int = 1
    recompute: Recompute = "none"
    efficiency: Efficiency | None = None
    measured: CostModel | None = None

    def workload(self, batches: tuple[tuple[int, ...], ...]) -> Workload:
        """Global batches of this job, with the prior of coverage.

        Raises:
            ConfigError: ranks cannot share micro-batches in this way.
            WorkloadError: heads, experts or layers cannot be divided in this way.
        """
        job, cost, config = self._job(), self._cost(), self.config
        check_whole_documents(
            config.selection,
            {
                "--cp": self.context_parallel_size,
                "--max-context-parallel": self._max_cp_size(),
                "--max-segments": config.max_segments,
            },
        )
        config = with_dense_length(config, cost, self.longest_tokens)
        return Workload(
            batches=batches,
            job=job,
            plan_settings=PlanSettings.from_config(config, self.cap_tokens, self._max_cp_size()),
            cost=cost,
            coverage=prior_coverage(
                job.layers, max(1, -(-self.longest_tokens // config.block_size))
            ),
            memory=MemoryModel(
                shape=self.model.on_ranks(self.tensor_parallel_size),
                layers_per_stage=tuple(sum(map(len, stage)) for stage in job.stage_layers),
                virtual_stages=job.virtual_stages,
                tied_embeddings=self.model.tied_embeddings,
                sequence_parallel=True,
                optimizer_ranks=self.ranks,
                expert_parallel_size=self.expert_parallel_size,
                sharded_parameters=self.sharded_parameters,
                recompute_all=self.recompute == "full",
                recompute_attention=self.recompute == "attention",
            ),
        )

    def _job(self) -> Job:
        experts, size = self.model.shape.experts, self.expert_parallel_size
        if size > 1 and experts is None:
            raise WorkloadError(f"--ep {size}: {self.model.name} has no experts; drop it")
        if experts is not None and experts.experts % size:
            raise WorkloadError(
                f"--ep {size}: must divide the {experts.experts} experts of {self.model.name}"
            )
        if self.sharded_parameters:
            check_sharded_parameters(self.stages, size, flags=("--pp", "--ep"))
        if self.ranks % size:
            raise WorkloadError(
                f"--ep {size}: must divide the {self.ranks} data-parallel x context-parallel ranks"
            )
        job = Job.even(
            layers=self.model.layers,
            ranks=self.ranks,
            stages=self.stages,
            micro_batches=self.micro_batches,
        )
        return replace(
            job,
            context_parallel_size=self.context_parallel_size,
            lockstep_ranks=max(
                self.lockstep_ranks, size, self.ranks if self.sharded_parameters else 1
            ),
        )

    def _max_cp_size(self) -> int:
        size, largest = self.context_parallel_size, self.max_context_parallel
        if largest is None:
            largest = default_max_cp_size(self.ranks, size, RANKS_PER_NODE)
        check_cp_sizes(self.ranks, size, largest, limit="--max-context-parallel")
        return largest

    def _cost(self) -> CostModel:
        cost = self.measured
        if cost is None:
            cost = counted_cost(
                self.model,
                block_size=self.config.block_size,
                tensor_parallel_size=self.tensor_parallel_size,
                expert_parallel_size=self.expert_parallel_size,
                selection=self.config.selection,
                device=self.config.counted_device,
                efficiency=self.efficiency,
                gigabytes_per_second=self.config.gigabytes_per_second,
            )
        return cost.with_recompute(
            full=self.recompute == "full", attention_only=self.recompute == "attention"
        )


class Setup(NamedTuple):
    """A job on generated lengths. Sizes count ranks, stages and samples."""

    data: tuple[str, ...]
    data_parallel_size: int
    pipeline_stages: int
    tensor_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    model: str = "qwen2.5-3b"
    lockstep_ranks: int = 1

    @property
    def micro_batches(self) -> int:
        """Positions of a rank."""
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)

    def workload(
        self, data: str, *, steps: int, seed: int, config: SparseBalanceConfig
    ) -> Workload:
        """Global batches of generated lengths, with micro-batches as full as the longest allow."""
        lengths = GENERATORS[data](steps * self.global_batch_size, seed)
        job = Scenario(
            model=MODELS[self.model],
            ranks=self.data_parallel_size,
            stages=self.pipeline_stages,
            tensor_parallel_size=self.tensor_parallel_size,
            micro_batches=self.micro_batches,
            lockstep_ranks=self.lockstep_ranks,
            config=config,
            cap_tokens=self.micro_batch_size * MAX_TOKENS,
            longest_tokens=MAX_TOKENS,
        )
        return job.workload(batches_of(lengths, self.global_batch_size, steps))


SETUPS: Mapping[str, Setup] = {
    "paper-main": Setup(("longalign", "chatqa2", "chatqa2-tail"), 4, 4, 2, 1, 16),
    "paper-ablation": Setup(("chatqa2", "chatqa2-tail"), 2, 4, 1, 2, 16),
    "scale-1024": Setup(("longalign",), 64, 4, 4, 1, 512),
    "scale-10240": Setup(("longalign",), 640, 4, 4, 1, 20480),
    "packed": Setup(("prolong",), 8, 4, 1, 4, 512),
    "lockstep-longalign": Setup(("longalign",), 8, 1, 2, 1, 64, lockstep_ranks=8),
    "lockstep-chatqa2": Setup(("chatqa2",), 8, 1, 2, 1, 64, lockstep_ranks=8),
    "lockstep-pipeline": Setup(("longalign", "chatqa2"), 8, 4, 2, 1, 32, lockstep_ranks=8),
    "lockstep-pipeline-2": Setup(("longalign", "chatqa2"), 8, 4, 2, 1, 16, lockstep_ranks=8),
}
"""Fields in the order of :class:`Setup`. The lockstep setups wait in every layer, as a group of
expert parallelism does, at the costs of the paper's dense model."""
