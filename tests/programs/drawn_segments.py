# SPDX-License-Identifier: Apache-2.0
"""The entry point with cuts drawn by lot.

A plan is made as ever. Then micro-batches are cut at any blocks, by a generator that all ranks seed
with the step; the first one always is cut. Start with ``--sparse-balance-device cpu``. Layer norms
are those of sequence_parallel.py.
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
    first, *others = plan.micro_batches
    block_size = inputs.plan_settings.block_size
    micro_batches = (
        cut(first, most_segments, block_size, None),
        *(cut(each, most_segments, block_size, generator) for each in others),
    )
    return replace(plan, micro_batches=micro_batches)


def cut(
    micro_batch: MicroBatchPlan,
    most_segments: int,
    block_size: int,
    generator: np.random.Generator | None,
) -> MicroBatchPlan:
    """Cut at drawn blocks; without a generator in two, or in one where there is but one block."""
    blocks = sum(-(-length // block_size) for length in micro_batch.lengths_tokens)
    if generator is None:
        first_blocks = (0, 1) if blocks > 1 else (0,)
    else:
        segments = int(generator.integers(1, min(most_segments, blocks) + 1))
        inner = generator.choice(np.arange(1, blocks), segments - 1, replace=False)
        first_blocks = (0, *sorted(inner.tolist()))
    return replace(micro_batch, first_blocks=first_blocks)


if __name__ == "__main__":
    from sparsebalance_megatron.pretrain_gpt import main

    mark_norms()
    step_planner.plan_step = plan_with_drawn_segments
    main()
