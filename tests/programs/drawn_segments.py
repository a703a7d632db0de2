# SPDX-License-Identifier: Apache-2.0
"""The entry point with cuts drawn by lot.

A plan is made as ever. Then micro-batches are cut at any blocks, by a generator that all ranks seed
with the step; the first one always is cut. Ranks of a lockstep group cut a position into equally
many segments, as many as its shortest member has blocks at most. Start with
``--sparse-balance-device cpu``. Layer norms are those of sequence_parallel.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from sequence_parallel import mark_norms

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.learn import step_planner  # noqa: E402
from sparsebalance_megatron.plan.planner import plan_step  # noqa: E402
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan  # noqa: E402
from sparsebalance_megatron.plan.step_problem import PlanInputs  # noqa: E402


def plan_with_drawn_segments(step: int, inputs: PlanInputs) -> StepPlan:
    """A plan whose micro-batches have other segments than planned."""
    whole = replace(inputs, plan_settings=replace(inputs.plan_settings, max_segments=1))
    plan = plan_step(step, whole)
    most_segments = inputs.plan_settings.max_segments
    if most_segments == 1:
        return plan
    generator = np.random.default_rng(step)
    block_size, members = inputs.plan_settings.block_size, inputs.job.lockstep_ranks
    micro_batches: list[MicroBatchPlan] = []
    for group in range(0, plan.data_parallel_size, members):
        ranks = [plan.for_rank(rank).micro_batches for rank in range(group, group + members)]
        for row in zip(*ranks, strict=True):
            blocks = [blocks_of(each, block_size) for each in row]
            most = min(most_segments, *blocks)
            segments = int(generator.integers(1, most + 1)) if micro_batches else min(2, most)
            micro_batches += [
                cut(each, segments, own, generator) for each, own in zip(row, blocks, strict=True)
            ]
    plan = replace(plan, micro_batches=tuple(micro_batches))
    plan.validate(inputs.lengths_tokens, inputs.job, inputs.plan_settings)
    return plan


def blocks_of(micro_batch: MicroBatchPlan, block_size: int) -> int:
    return sum(-(-length // block_size) for length in micro_batch.lengths_tokens)


def cut(
    micro_batch: MicroBatchPlan, segments: int, blocks: int, generator: np.random.Generator
) -> MicroBatchPlan:
    """Cut at drawn blocks."""
    inner = generator.choice(np.arange(1, blocks), segments - 1, replace=False)
    return replace(micro_batch, first_blocks=(0, *sorted(inner.tolist())))


if __name__ == "__main__":
    from sparsebalance_megatron.pretrain_gpt import main

    mark_norms()
    step_planner.plan_step = plan_with_drawn_segments
    main()
