# SPDX-License-Identifier: Apache-2.0
"""Named setups: the paper's two, two at scale, one of packed short documents.

The paper is arXiv:2604.13847.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_plan import PlanPolicy
from sparsebalance_megatron.view.simulate.lengths import GENERATORS, MAX_TOKENS
from sparsebalance_megatron.view.simulate.models import h200_cost, prior_coverage, with_bandwidth
from sparsebalance_megatron.view.simulate.presets import ModelPreset, preset
from sparsebalance_megatron.view.simulate.variants import Sharing, Workload

BLOCK_SIZE = 256
BASE_BUDGET = 32


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


def default_policy(
    *, block_size: int, base_budget: int, coverage_threshold: float, cap_tokens: int
) -> PlanPolicy:
    """A policy whose batching and tuning a variant replaces."""
    return PlanPolicy(
        batching="makespan",
        tuning="makespan",
        anchor="mean",
        coverage_threshold=coverage_threshold,
        base_budget=base_budget,
        block_size=block_size,
        max_tokens_per_micro_batch=cap_tokens,
    )


def workload(
    batches: tuple[tuple[int, ...], ...],
    *,
    layers: int,
    ranks: int,
    stages: int,
    micro_batches: int,
    policy: PlanPolicy,
    cost: CostModel,
    longest_tokens: int,
    sharing: Sharing | None = None,
) -> Workload:
    """Global batches on a job whose layers are split evenly, with the prior of coverage."""
    return Workload(
        batches=batches,
        job=Job.even(layers=layers, ranks=ranks, stages=stages, micro_batches=micro_batches),
        policy=policy,
        cost=cost,
        sharing=sharing or Sharing(),
        coverage=prior_coverage(layers, max(1, -(-longest_tokens // cost.block_size))),
    )


def workload_of(
    setup: Setup,
    data: str | np.ndarray,
    *,
    steps: int,
    seed: int,
    coverage_threshold: float,
    sharing: Sharing | None = None,
    gigabytes_per_second: float | None = None,
    model: ModelPreset | None = None,
) -> Workload:
    """``steps`` global batches in order.

    Args:
        data: the name of a distribution to draw lengths from, or lengths in tokens.
        model: in place of the setup's.
    """
    model = model or preset(setup.model)
    samples = steps * setup.global_batch_size
    lengths = GENERATORS[data](samples, seed) if isinstance(data, str) else data[:samples]
    longest = max(MAX_TOKENS, int(lengths.max()))
    cost = h200_cost(model, block_size=BLOCK_SIZE, tensor_parallel_size=setup.tensor_parallel_size)
    return workload(
        batches_of(lengths, setup.global_batch_size),
        layers=model.layers,
        ranks=setup.data_parallel_size,
        stages=setup.pipeline_stages,
        micro_batches=setup.micro_batches,
        policy=default_policy(
            block_size=BLOCK_SIZE,
            base_budget=BASE_BUDGET,
            coverage_threshold=coverage_threshold,
            cap_tokens=setup.micro_batch_size * longest,
        ),
        cost=with_bandwidth(cost, gigabytes_per_second),
        longest_tokens=longest,
        sharing=sharing,
    )


def batches_of(lengths: np.ndarray, batch_size: int) -> tuple[tuple[int, ...], ...]:
    """Consecutive global batches; an incomplete last one is left out."""
    whole = len(lengths) // batch_size * batch_size
    return tuple(tuple(row) for row in lengths[:whole].reshape(-1, batch_size).tolist())
