# SPDX-License-Identifier: Apache-2.0
"""Named jobs of Qwen2.5-3B on generated lengths; two are the paper's."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from simulated.lengths import LENGTHS, MAX_TOKENS
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.cost.model import DEFAULT_EFFICIENCY, CostModel
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.learn.host_planner import HostJob
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.workload import Workload, batches_of

LAYERS = 36
SHAPE = ModelShape(
    hidden_size=2048,
    ffn_hidden_size=11008,
    num_attention_heads=16,
    num_query_groups=2,
    head_dim=128,
    vocab_size=151936,
    gated_linear_unit=True,
    tensor_parallel_size=1,
)
"""Qwen2.5-3B, as published on huggingface.co."""


@dataclass(frozen=True)
class Setup:
    """A job; ``ranks`` are data-parallel ones, and ``steps`` are those of RESULTS.

    ``lockstep_ranks`` wait for one another in every layer, as a group of expert parallelism does,
    at the costs of the dense model.
    """

    data: tuple[str, ...]
    ranks: int
    stages: int
    tensor_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    lockstep_ranks: int = 1
    steps: int = 24

    def workload(
        self,
        data: str,
        *,
        steps: int,
        seed: int,
        config: SparseBalanceConfig,
        cp_size: int = 1,
        sparse_efficiency: float | None = None,
    ) -> Workload:
        """Global batches of generated lengths.

        Args:
            cp_size: ranks that share every micro-batch, of the same ranks.
            sparse_efficiency: share of the peak that sparse attention reaches; None takes the
                selection's.
        """
        lengths = LENGTHS[data](steps * self.global_batch_size, seed)
        shape = replace(SHAPE, tensor_parallel_size=self.tensor_parallel_size)
        layout = Job.even(
            layers=LAYERS,
            ranks=self.ranks,
            stages=self.stages,
            micro_batches=self.global_batch_size * cp_size // (self.micro_batch_size * self.ranks),
        )
        job = HostJob(
            layout=replace(
                layout, context_parallel_size=cp_size, lockstep_ranks=self.lockstep_ranks
            ),
            shape=shape,
            max_sample_tokens=MAX_TOKENS,
            global_batch_size=self.global_batch_size,
            neighbours_per_node=8 // self.tensor_parallel_size,
        )
        batches = batches_of(lengths, self.global_batch_size, steps, data)
        found = Workload.of(job, config, batches, micro_batch_size=self.micro_batch_size)
        if sparse_efficiency is None:
            return found
        cost = CostModel.analytic(
            shape,
            config.block_size,
            selection=config.selection,
            device=config.counted_device,
            efficiency=replace(DEFAULT_EFFICIENCY, sparse=sparse_efficiency),
        )
        tokens = with_dense_length(config, cost, MAX_TOKENS).dense_up_to_tokens
        settings = found.plan_settings.with_dense_length(tokens)
        return replace(found, cost=cost, plan_settings=settings)


SETUPS: Mapping[str, Setup] = {
    "paper-main": Setup(("longalign", "chatqa2", "chatqa2-tail"), 4, 4, 2, 1, 16, steps=48),
    "paper-ablation": Setup(("chatqa2", "chatqa2-tail"), 2, 4, 1, 2, 16, steps=48),
    "scale-1024": Setup(("longalign",), 64, 4, 4, 1, 512),
    "scale-10240": Setup(("longalign",), 640, 4, 4, 1, 20480, steps=8),
    "packed": Setup(("prolong",), 8, 4, 1, 4, 512),
    "lockstep-longalign": Setup(("longalign",), 8, 1, 2, 1, 64, lockstep_ranks=8),
    "lockstep-chatqa2": Setup(("chatqa2",), 8, 1, 2, 1, 64, lockstep_ranks=8),
    "lockstep-pipeline": Setup(("longalign", "chatqa2"), 8, 4, 2, 1, 32, lockstep_ranks=8),
    "lockstep-pipeline-2": Setup(("longalign", "chatqa2"), 8, 4, 2, 1, 16, lockstep_ranks=8),
}
"""Fields in the order of :class:`Setup`."""
_BOTH = ("longalign", "chatqa2")
WINDOW_SETUPS: Mapping[str, Setup] = {
    "sharded-64x1": Setup(_BOTH, 64, 1, 1, 1, 64, lockstep_ranks=64, steps=32),
    "ranks-64x2-pipeline": Setup(_BOTH, 64, 4, 1, 1, 128, steps=16),
    "ranks-8x2": Setup(_BOTH, 8, 1, 1, 1, 16, steps=32),
    "ranks-8x2-pipeline": Setup(_BOTH, 8, 4, 1, 1, 16, steps=32),
    "experts-8x2": Setup(_BOTH, 8, 1, 2, 1, 16, lockstep_ranks=8, steps=32),
    "paper-main": Setup(_BOTH, 4, 4, 2, 1, 16, steps=32),
}
"""Jobs of few samples a rank, by ranks and samples of each."""
