# SPDX-License-Identifier: Apache-2.0
"""The entry point with cuts drawn by lot.

A plan is made as ever, or with cp_sizes drawn as in shared_micro_batches.py where ranks may share.
Then micro-batches are cut at any blocks, by a generator that all ranks seed with the step; the
first one that has the blocks always is cut. Every segment has a block for each rank that shares it.
Ranks of a lockstep group cut a position into equally many segments, as many as its shortest member
has blocks at most. Start with ``--sparse-balance-device cpu``. Layer norms are marked
as in changed_entry.py.

With ``LISTS`` in the environment, every rank leaves the lists of its first step in that folder:
``rank0.pickle`` has (layer, sample, row of its document, head) -> blocks of the document. A row is
a block of queries or a token.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from changed_entry import mark_norms
from shared_micro_batches import plan_with_drawn_cp_sizes

from sparsebalance_megatron.megatron import cpu

cpu.install()

from sparsebalance_megatron.attention.selection import Selection  # noqa: E402
from sparsebalance_megatron.learn import step_planner  # noqa: E402
from sparsebalance_megatron.megatron import settings  # noqa: E402
from sparsebalance_megatron.megatron.core_attention import BudgetedCoreAttention  # noqa: E402
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch  # noqa: E402
from sparsebalance_megatron.megatron.sequence_groups import rank_place  # noqa: E402
from sparsebalance_megatron.plan.planner import plan_step  # noqa: E402
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, StepPlan  # noqa: E402
from sparsebalance_megatron.plan.step_problem import PlanInputs  # noqa: E402

PLANS: dict[int, StepPlan] = {}
"""Plans that were made, by step."""


def plan_with_drawn_segments(step: int, inputs: PlanInputs) -> StepPlan:
    """A plan whose micro-batches have other segments than planned."""
    plan_settings, members = inputs.plan_settings, inputs.job.lockstep_ranks
    shares = plan_settings.max_context_parallel > 1
    whole = replace(inputs, plan_settings=replace(plan_settings, max_segments=1))
    plan = (plan_with_drawn_cp_sizes if shares else plan_step)(step, whole)
    PLANS[step] = plan
    most_segments = plan_settings.max_segments
    if most_segments == 1:
        return plan
    generator = np.random.default_rng(step)
    micro_batches: list[MicroBatchPlan] = []
    by_row = sorted(plan.micro_batches, key=lambda each: row_of(each, members))
    for _, group in groupby(by_row, key=lambda each: row_of(each, members)):
        row = list(group)
        blocks = [blocks_of(each, plan_settings.block_size) for each in row]
        per_rank = [own // each.cp_size for each, own in zip(row, blocks, strict=True)]
        most = max(1, min(most_segments, *per_rank))
        first = all(each.segments == 1 for each in micro_batches)
        segments = min(2, most) if first else int(generator.integers(1, most + 1))
        micro_batches += [
            cut(each, segments, own, generator) for each, own in zip(row, blocks, strict=True)
        ]
    plan = PLANS[step] = replace(plan, micro_batches=tuple(micro_batches))
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


def kept_lists() -> dict[tuple[int, int, int, int], list[int]]:
    """Takes down the lists of the first step as they are made; a first forward of each layer, and
    its recomputed pass, make the same."""
    made: dict[tuple[int, int, int, int], list[int]] = {}
    select = BudgetedCoreAttention.select

    def selected(self: Any, q_THD: Any, k_TGD: Any, context: LocalMicroBatch) -> Selection:
        selection = select(self, q_THD, k_TGD, context)
        if context.step:
            return selection
        own = PLANS[0].for_rank(rank_place().data_parallel_rank)
        samples = own.micro_batches[context.position].samples
        keys, layout = selection.kv_layout.grid, selection.query_layout
        own_N = selection.own_block_N.numpy()
        for row, (lists, counts) in enumerate(
            zip(selection.indices_QCK.tolist(), selection.counts_QC.tolist(), strict=True)
        ):
            block = own_N[int(layout.block_T[row]) if selection.by_token else row]
            document, within = int(keys.document_N[block]), int(keys.index_N[block])
            if document >= len(samples):
                continue
            if selection.by_token:
                token = row - int(layout.start_N[layout.block_T[row]])
                within = within * keys.block_size + token
            first = int(keys.first_block_S[document])
            for head, (listed, count) in enumerate(zip(lists, counts, strict=True)):
                name = self._layer_index, samples[document], within, head
                made[name] = [each - first for each in listed[:count]]
        return selection

    BudgetedCoreAttention.select = selected  # type: ignore[method-assign]
    return made


if __name__ == "__main__":
    from sparsebalance_megatron.pretrain_gpt import main

    mark_norms()
    settings.RANKS_PER_NODE = 2
    step_planner.plan_step = plan_with_drawn_segments
    folder = os.environ.get("LISTS")
    lists = kept_lists() if folder else {}
    main()
    if folder:
        Path(folder, f"rank{os.environ['RANK']}.pickle").write_bytes(pickle.dumps(lists))
