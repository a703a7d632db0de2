# SPDX-License-Identifier: Apache-2.0
"""The entry point with cuts, and micro-batches of every rank, drawn by lot.

A plan is made as ever. Then, by a generator that all ranks seed with the step, the last micro-batch
of some ranks is packed with the one before it, and micro-batches are cut at any blocks; the first
of some rank always is. Start with ``--sparse-balance-device cpu``. Layer norms are those of
sequence_parallel.py.
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
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402


def plan_with_drawn_segments(step: int, inputs: PlanInputs) -> StepPlan:
    """A plan with other micro-batches than predicted; places that a rank does not fill take 0."""
    whole = replace(inputs, policy=replace(inputs.policy, max_segments=1))
    plan = plan_step(step, whole)
    most_segments = inputs.policy.max_segments
    if most_segments == 1:
        return plan
    generator = np.random.default_rng(step)
    times_2RPVM = plan.expectation.times_2RPVM.copy()
    micro_batches: list[MicroBatchPlan] = []
    for rank in range(plan.data_parallel_size):
        own = list(plan.for_rank(rank).micro_batches)
        if rank and len(own) > 1 and generator.random() < 0.7:
            last = own.pop()
            own[-1] = packed_with(own[-1], last)
            times_2RPVM[:, rank, :, :, last.position] = 0.0
        micro_batches += [
            cut(each, most_segments, inputs.policy.block_size, generator) for each in own
        ]
    micro_batches[0] = cut(micro_batches[0], most_segments, inputs.policy.block_size, None)
    expectation = replace(plan.expectation, times_2RPVM=times_2RPVM)
    return replace(plan, micro_batches=tuple(micro_batches), expectation=expectation)


def packed_with(one: MicroBatchPlan, other: MicroBatchPlan) -> MicroBatchPlan:
    return replace(
        one,
        samples=one.samples + other.samples,
        lengths_tokens=one.lengths_tokens + other.lengths_tokens,
        budgets_LS=np.concatenate([one.budgets_LS, other.budgets_LS], axis=1),
    )


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
    mark_norms()
    step_planner.plan_step = plan_with_drawn_segments
    main()
