# SPDX-License-Identifier: Apache-2.0
"""Named setups: the paper's two, two at scale, one of packed short documents.

The paper is arXiv:2604.13847.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.learn.prediction import Workload, prior_coverage
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_plan import PlanPolicy
from sparsebalance_megatron.view.simulate.lengths import GENERATORS, MAX_TOKENS, batches_of
from sparsebalance_megatron.view.simulate.models import MODELS, ModelPreset, counted_cost

RANKS_PER_NODE = 8


class Setup(NamedTuple):
    """A job on generated lengths. Sizes count ranks, stages and samples."""

    data: tuple[str, ...]
    data_parallel_size: int
    pipeline_stages: int
    tensor_parallel_size: int
    micro_batch_size: int
    global_batch_size: int
    model: str = "qwen2.5-3b"

    @property
    def micro_batches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.data_parallel_size)


SETUPS: Mapping[str, Setup] = {
    "paper-main": Setup(("longalign", "chatqa2", "chatqa2-tail"), 4, 4, 2, 1, 16),
    "paper-ablation": Setup(("chatqa2", "chatqa2-tail"), 2, 4, 1, 2, 16),
    "scale-1024": Setup(("longalign",), 64, 4, 4, 1, 512),
    "scale-10240": Setup(("longalign",), 640, 4, 4, 1, 20480),
    "packed": Setup(("prolong",), 8, 4, 1, 4, 512),
}
"""Fields in the order of :class:`Setup`."""

PAPER_ABLATION: Mapping[str, tuple[float | None, float]] = {
    "baseline": (1.81, 1.00),
    "+DST": (1.73, 1.08),
    "+SAB": (1.41, 1.21),
    "+LBB": (None, 1.23),
    "LBB+DST": (None, 1.28),
    "SAB+DST": (1.34, 1.35),
}
"""Published micro-batch imbalance (max/mean) and speedup of paper-ablation's rows."""


def shared_job(context_parallel_size: int, *, micro_batches: int, **sizes: int) -> Job:
    """A job whose layers are split evenly; sharing leaves each of its ranks more positions.

    Args:
        micro_batches: positions of a rank where none share.
        sizes: see :meth:`.Job.even`.
    """
    job = Job.even(micro_batches=micro_batches * context_parallel_size, **sizes)
    return replace(job, context_parallel_size=context_parallel_size)


def workload(
    batches: tuple[tuple[int, ...], ...],
    *,
    job: Job,
    config: SparseBalanceConfig,
    cap_tokens: int,
    max_cp_size: int,
    cost: CostModel,
    longest_tokens: int,
) -> Workload:
    """Global batches under a configuration's policy, with the prior of coverage.

    Args:
        cap_tokens: of a micro-batch on one rank.
        longest_tokens: the longest sample that coverage is known of.
    """
    return Workload(
        batches=batches,
        job=job,
        policy=PlanPolicy.from_config(config, cap_tokens, max_cp_size),
        cost=cost,
        coverage=prior_coverage(job.layers, max(1, -(-longest_tokens // cost.block_size))),
    )


def workload_of(
    setup: Setup,
    data: str | np.ndarray,
    *,
    steps: int,
    seed: int,
    config: SparseBalanceConfig,
    model: ModelPreset | None = None,
    context_parallel_size: int = 1,
    max_cp_size: int = 1,
) -> Workload:
    """``steps`` global batches in order.

    Args:
        data: the name of a distribution to draw lengths from, or lengths in tokens.
        model: in place of the setup's.
    """
    model = model or MODELS[setup.model]
    samples = steps * setup.global_batch_size
    lengths = GENERATORS[data](samples, seed) if isinstance(data, str) else data
    longest = max(MAX_TOKENS, int(lengths[:samples].max()))
    cost = counted_cost(
        model,
        block_size=config.block_size,
        tensor_parallel_size=setup.tensor_parallel_size,
        device=config.counted_device,
    )
    cost = cost.with_bandwidth(config.gigabytes_per_second)
    return workload(
        batches_of(lengths, setup.global_batch_size, steps),
        job=shared_job(
            context_parallel_size,
            layers=model.layers,
            ranks=setup.data_parallel_size,
            stages=setup.pipeline_stages,
            micro_batches=setup.micro_batches,
        ),
        config=config,
        cap_tokens=setup.micro_batch_size * longest,
        max_cp_size=max_cp_size,
        cost=cost,
        longest_tokens=longest,
    )
