# SPDX-License-Identifier: Apache-2.0
"""The entry point with widths drawn by lot: rows lie on any ranks that groups exist for.

A plan for narrow rows, or for rows as wide as the context-parallel groups, is made as ever; then
neighbours at a position merge their rows, by a generator that all ranks seed with the step. Where a
row holds several samples it may also fall apart into narrow ones. A node has two ranks. Start with
``--sparse-balance-device cpu``.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.learn import step_planner  # noqa: E402
from sparsebalance_megatron.megatron import settings  # noqa: E402
from sparsebalance_megatron.plan.planner import plan_step  # noqa: E402
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan  # noqa: E402
from sparsebalance_megatron.plan.step_problem import PlanInputs  # noqa: E402
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402


def plan_with_drawn_widths(step: int, inputs: PlanInputs) -> StepPlan:
    """A plan of the inputs' own ranks and positions, whose widths are drawn."""
    job, policy = inputs.job, inputs.policy
    group = job.context_parallel_size
    narrow = replace(
        job, data_parallel_size=job.data_parallel_size // group, context_parallel_size=1
    )
    roomy = replace(
        policy,
        max_tokens_per_slot=policy.max_tokens_per_slot * group,
        context_parallel="static",
        max_context_parallel=1,
    )
    scales = replace(inputs.scales, slowness_RP=None)
    plan = plan_step(step, replace(inputs, job=narrow, policy=roomy, scales=scales))
    generator = np.random.default_rng(step)
    slots = [replace(slot, rank=slot.rank * group, width=group) for slot in plan.slots]
    if policy.context_parallel == "dynamic":
        slots = [
            slot
            for position in range(job.micro_batches)
            for slot in drawn(
                [slot for slot in slots if slot.position == position],
                policy.max_context_parallel,
                generator,
            )
        ]
    expected = plan.expectation
    plan = replace(
        plan,
        data_parallel_size=job.data_parallel_size,
        slots=tuple(slots),
        expectation=replace(
            expected,
            times_2RPVM=expected.times_2RPVM.repeat(group, axis=1),
            rank_makespan_ms=tuple(np.repeat(expected.rank_makespan_ms, group)),
        ),
    )
    plan.validate(inputs.lengths_tokens, job, policy)
    return plan


def drawn(
    slots: list[MicroBatchPlan], widest: int, generator: np.random.Generator
) -> list[MicroBatchPlan]:
    """The slots of one position, merged and split by lot."""
    width = slots[0].width
    while 2 * width <= widest:
        width *= 2
        slots = [
            slot
            for pair in itertools.batched(slots, 2)
            for slot in pairwise_merged(pair, width, generator)
        ]
    return [part for slot in slots for part in split(slot, generator)]


def pairwise_merged(
    pair: tuple[MicroBatchPlan, ...], width: int, generator: np.random.Generator
) -> tuple[MicroBatchPlan, ...]:
    """The pair, or one slot of the given width where both have half of it."""
    halves = [slot.width for slot in pair] == [width // 2] * 2
    return (merged(*pair),) if halves and generator.random() < 0.6 else pair


def merged(*slots: MicroBatchPlan) -> MicroBatchPlan:
    """One row on the ranks of all."""
    return replace(
        slots[0],
        samples=tuple(itertools.chain(*(slot.samples for slot in slots))),
        lengths_tokens=tuple(itertools.chain(*(slot.lengths_tokens for slot in slots))),
        budgets_LS=np.concatenate([slot.budgets_LS for slot in slots], axis=1),
        width=sum(slot.width for slot in slots),
    )


def split(slot: MicroBatchPlan, generator: np.random.Generator) -> list[MicroBatchPlan]:
    """The slot, or its halves on half of its ranks each."""
    if slot.width == 1 or len(slot.samples) < 2 or generator.random() < 0.7:
        return [slot]
    half, cut = slot.width // 2, len(slot.samples) // 2
    parts = (slice(None, cut), slice(cut, None))
    return [
        replace(
            slot,
            samples=slot.samples[part],
            lengths_tokens=slot.lengths_tokens[part],
            budgets_LS=slot.budgets_LS[:, part],
            rank=slot.rank + place * half,
            width=half,
        )
        for place, part in enumerate(parts)
    ]


if __name__ == "__main__":
    settings.RANKS_PER_NODE = 2
    step_planner.plan_step = plan_with_drawn_widths
    main()
