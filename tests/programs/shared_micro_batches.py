# SPDX-License-Identifier: Apache-2.0
"""The entry point with cp_sizes drawn by lot: micro-batches are on any ranks that groups exist for.

A plan for rows of one rank, or of as many as the context-parallel groups have, is made as ever;
then neighbours at a position merge their rows, by a generator that all ranks seed with the step.
Where a row holds several samples it may also fall apart into rows of one rank. A node has two
ranks. Start with ``--sparse-balance-device cpu``.
"""

import itertools
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.cost.model import StageScales  # noqa: E402
from sparsebalance_megatron.learn import step_planner  # noqa: E402
from sparsebalance_megatron.megatron import settings  # noqa: E402
from sparsebalance_megatron.plan.planner import plan_step  # noqa: E402
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan  # noqa: E402
from sparsebalance_megatron.plan.step_problem import PlanInputs  # noqa: E402
from sparsebalance_megatron.pretrain_gpt import main  # noqa: E402


def plan_with_drawn_cp_sizes(step: int, inputs: PlanInputs) -> StepPlan:
    """A plan of the inputs' own ranks and positions, whose cp_sizes are drawn."""
    job, plan_settings = inputs.job, inputs.plan_settings
    group = job.context_parallel_size
    narrow = replace(
        job, data_parallel_size=job.data_parallel_size // group, context_parallel_size=1
    )
    roomy = replace(
        plan_settings,
        config=replace(plan_settings.config, context_parallel="static", max_context_parallel=None),
        max_tokens_per_micro_batch=plan_settings.max_tokens_per_micro_batch * group,
        max_cp_size=1,
    )
    scales = StageScales.of(inputs.scales.scales_2PV, cut_ratio=inputs.scales.cut_ratio)
    plan = plan_step(step, replace(inputs, job=narrow, plan_settings=roomy, scales=scales))
    generator = np.random.default_rng(step)
    micro_batches = [
        replace(each, rank=each.rank * group, cp_size=group) for each in plan.micro_batches
    ]
    if plan_settings.config.context_parallel == "dynamic":
        micro_batches = [
            micro_batch
            for position in range(job.micro_batches)
            for micro_batch in drawn(
                [micro_batch for micro_batch in micro_batches if micro_batch.position == position],
                plan_settings.max_cp_size,
                generator,
            )
        ]
    expected = plan.expectation
    plan = replace(
        plan,
        data_parallel_size=job.data_parallel_size,
        micro_batches=tuple(micro_batches),
        expectation=replace(
            expected,
            times_2RPVM=expected.times_2RPVM.repeat(group, axis=1),
            rank_makespan_ms=tuple(np.repeat(expected.rank_makespan_ms, group)),
        ),
    )
    plan.validate(inputs.lengths_tokens, job, plan_settings)
    return plan


def drawn(
    micro_batches: list[MicroBatchPlan], most_ranks: int, generator: np.random.Generator
) -> list[MicroBatchPlan]:
    """The micro-batches of one position, merged and split by lot."""
    cp_size = micro_batches[0].cp_size
    while 2 * cp_size <= most_ranks:
        cp_size *= 2
        micro_batches = [
            micro_batch
            for pair in itertools.batched(micro_batches, 2)
            for micro_batch in pairwise_merged(pair, cp_size, generator)
        ]
    return [part for micro_batch in micro_batches for part in split(micro_batch, generator)]


def pairwise_merged(
    pair: tuple[MicroBatchPlan, ...], cp_size: int, generator: np.random.Generator
) -> tuple[MicroBatchPlan, ...]:
    """The pair, or one micro-batch of the given cp_size where both have half of it."""
    halves = [micro_batch.cp_size for micro_batch in pair] == [cp_size // 2] * 2
    return (merged(*pair),) if halves and generator.random() < 0.6 else pair


def merged(*micro_batches: MicroBatchPlan) -> MicroBatchPlan:
    """One packed sequence on the ranks of all."""
    dense_PL = np.array([each.dense_documents_L for each in micro_batches])
    whole_PL = dense_PL == [[len(each.samples)] for each in micro_batches]
    # Dense documents behind others are not first.
    dense_PL[1:] *= np.logical_and.accumulate(whole_PL, axis=0)[:-1]
    return replace(
        micro_batches[0],
        samples=tuple(itertools.chain(*(micro_batch.samples for micro_batch in micro_batches))),
        lengths_tokens=tuple(
            itertools.chain(*(micro_batch.lengths_tokens for micro_batch in micro_batches))
        ),
        budgets_LS=np.concatenate(
            [micro_batch.budgets_LS for micro_batch in micro_batches], axis=1
        ),
        cp_size=sum(micro_batch.cp_size for micro_batch in micro_batches),
        dense_documents_L=dense_PL.sum(axis=0),
    )


def split(micro_batch: MicroBatchPlan, generator: np.random.Generator) -> list[MicroBatchPlan]:
    """The micro-batch, or its halves on half of its ranks each."""
    if micro_batch.cp_size == 1 or len(micro_batch.samples) < 2 or generator.random() < 0.7:
        return [micro_batch]
    half, cut = micro_batch.cp_size // 2, len(micro_batch.samples) // 2
    parts, sizes = (slice(None, cut), slice(cut, None)), (cut, len(micro_batch.samples) - cut)
    return [
        replace(
            micro_batch,
            samples=micro_batch.samples[part],
            lengths_tokens=micro_batch.lengths_tokens[part],
            budgets_LS=micro_batch.budgets_LS[:, part],
            rank=micro_batch.rank + place * half,
            cp_size=half,
            dense_documents_L=(micro_batch.dense_documents_L - place * cut).clip(0, size),
        )
        for place, (part, size) in enumerate(zip(parts, sizes, strict=True))
    ]


if __name__ == "__main__":
    settings.RANKS_PER_NODE = 2
    step_planner.plan_step = plan_with_drawn_cp_sizes
    main()
