# SPDX-License-Identifier: Apache-2.0
"""The entry point with cuts drawn by lot.

A plan is made as ever, or with cp_sizes drawn as in shared_micro_batches.py where ranks may share.
Then micro-batches are cut at any blocks, by a generator that all ranks seed with the step; the
first one that has the blocks always is cut. Every segment has a block for each rank that shares it.
Ranks of a lockstep group cut a position into equally many segments, as many as its shortest member
has blocks at most. Start with ``--sparse-balance-device cpu``. Layer norms are marked
as in changed_entry.py.
"""

from dataclasses import replace
from itertools import groupby

import numpy as np
from changed_entry import mark_norms
from shared_micro_batches import plan_with_drawn_cp_sizes

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.learn import step_planner  # noqa: E402
from sparsebalance_megatron.megatron import settings  # noqa: E402
from sparsebalance_megatron.plan.planner import plan_step  # noqa: E402
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan  # noqa: E402
from sparsebalance_megatron.plan.step_problem import PlanInputs  # noqa: E402


def plan_with_drawn_segments(step: int, inputs: PlanInputs) -> StepPlan:
    """A plan whose micro-batches have other segments than planned."""
    plan_settings, members = inputs.plan_settings, inputs.job.lockstep_ranks
    shares = plan_settings.max_cp_size > 1
    config = replace(plan_settings.config, max_segments=1)
    whole = replace(inputs, plan_settings=replace(plan_settings, config=config))
    plan = (plan_with_drawn_cp_sizes if shares else plan_step)(step, whole)
    most_segments = plan_settings.config.max_segments
    if most_segments == 1:
        return plan
    generator = np.random.default_rng(step)
    micro_batches: list[MicroBatchPlan] = []
    by_row = sorted(plan.micro_batches, key=lambda each: row_of(each, members))
    for _, group in groupby(by_row, key=lambda each: row_of(each, members)):
        row = list(group)
        blocks = [blocks_of(each, plan_settings.config.block_size) for each in row]
        per_rank = [own // each.cp_size for each, own in zip(row, blocks, strict=True)]
        most = max(1, min(most_segments, *per_rank))
        first = all(each.segments == 1 for each in micro_batches)
        segments = min(2, most) if first else int(generator.integers(1, most + 1))
        micro_batches += [
            cut(each, segments, own, generator) for each, own in zip(row, blocks, strict=True)
        ]
    plan = replace(plan, micro_batches=tuple(micro_batches))
    plan.validate(inputs.lengths_tokens, inputs.job, plan_settings)
    return plan


def row_of(micro_batch: MicroBatchPlan, members: int) -> tuple[int, int]:
    return micro_batch.rank // members, micro_batch.position


def blocks_of(micro_batch: MicroBatchPlan, block_size: int) -> int:
    return sum(-(-length // block_size) for length in micro_batch.lengths_tokens)


def cut(
    micro_batch: MicroBatchPlan, segments: int, blocks: int, generator: np.random.Generator
) -> MicroBatchPlan:
    """Cut at drawn blocks."""
    spare = micro_batch.cp_size - 1
    inner = generator.choice(np.arange(1, blocks - segments * spare), segments - 1, replace=False)
    inner = np.sort(inner) + spare * np.arange(1, segments)
    return replace(micro_batch, segment_starts_blocks=(0, *inner.tolist()))


if __name__ == "__main__":
    from sparsebalance_megatron.pretrain_gpt import main

    mark_norms()
    settings.RANKS_PER_NODE = 2
    step_planner.plan_step = plan_with_drawn_segments
    main()
