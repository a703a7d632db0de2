# SPDX-License-Identifier: Apache-2.0
"""Jobs that tests predict."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.table import ExpertShape, ModelShape
from sparsebalance_megatron.learn.host_planner import HostJob
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.workload import Workload

SHAPE = ModelShape(
    hidden_size=896,
    ffn_hidden_size=4864,
    num_attention_heads=14,
    num_query_groups=2,
    head_dim=64,
    vocab_size=151936,
    gated_linear_unit=True,
    tensor_parallel_size=1,
)
"""Qwen2.5-0.5B."""
EXPERTS = replace(SHAPE, experts=ExpertShape(experts=128, top_k=8, ffn_hidden_size=768))
"""Qwen2.5-0.5B with the experts of Qwen3-30B-A3B."""
LENGTHS = (4096, 900, 2048, 300, 8192, 512, 1024, 600)


def workload(
    batches: Sequence[Sequence[int]] = (LENGTHS,),
    *,
    layers: int = 24,
    ranks: int = 2,
    stages: int = 2,
    micro_batches: int = 4,
    cp_size: int = 1,
    lockstep_ranks: int = 1,
    cap_tokens: int = 8192,
    shape: ModelShape = SHAPE,
    sharded_parameters: bool = False,
    config: dict[str, Any] | None = None,
    **of_job: Any,
) -> Workload:
    """A small model on two ranks of two stages with blocks of 128 tokens."""
    layout = Job.even(layers=layers, ranks=ranks, stages=stages, micro_batches=micro_batches)
    layout = replace(layout, context_parallel_size=cp_size, lockstep_ranks=lockstep_ranks)
    settings = {"block_size": 128, "base_budget": 8, "max_tokens_per_micro_batch": cap_tokens}
    settings |= {"dense_up_to": "0"}
    choices = SparseBalanceConfig(**settings | (config or {}))
    job = HostJob(
        layout=layout,
        shape=shape,
        max_sample_tokens=8192,
        global_batch_size=len(batches[0]),
        **of_job,
    )
    return Workload.of(job, choices, batches, sharded_parameters=sharded_parameters)
