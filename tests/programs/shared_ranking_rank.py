# SPDX-License-Identifier: Apache-2.0
"""One member of a context group ranks its queries with every selector, and the whole row alone."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from attention.sequence.slices import local_selection

from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.select.block_topk import BlockTopK
from sparsebalance_megatron.attention.sequence.all_gather import AllGatherExchange
from sparsebalance_megatron.attention.sequence.ranking import rank_slice
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup, SequenceSlice
from sparsebalance_megatron.selector_registry import BUILT_IN

RANK, MEMBERS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
CU_SEQLENS = (0, 70, 75, 139, 240)
BLOCK_TOKENS, BUDGET = 16, 3
OPTIONS = {"softmax_scale": 0.35, "max_budget": BUDGET, "observe": True}
FEW_ROUNDINGS = 4 * 2.0**-23
"""Sums of mass in another order; curves are float32."""


def compare() -> None:
    dist.init_process_group("gloo")
    group = SequenceGroup(member=RANK, members=MEMBERS)
    held = SequenceSlice.dealt(CU_SEQLENS, group, block_size=BLOCK_TOKENS)
    exchange = AllGatherExchange(dist.group.WORLD)
    generator = torch.Generator().manual_seed(5)
    q_THD = torch.randn(CU_SEQLENS[-1], 4, 8, generator=generator)
    k_TGD = torch.randn(CU_SEQLENS[-1], 2, 8, generator=generator)
    budgets_S = torch.tensor([3, 1, 2, 3])
    for name in BUILT_IN:
        selector = selector_named(name)
        if not isinstance(selector, BlockTopK):
            continue
        whole = rank_sequence(selector, q_THD, k_TGD, held.whole_layout, **OPTIONS)
        local = q_THD[held.tokens_T], k_TGD[held.tokens_T]
        own = rank_slice(selector, *local, held, exchange=exchange, **OPTIONS)
        expected = local_selection(selector.select(whole, budgets_S), held)
        found = selector.select(own, budgets_S)
        assert torch.equal(found.counts_QC, expected.counts_QC), name
        assert torch.equal(found.indices_QCK, expected.indices_QCK), name
        curves_SK = selector.coverage(own)
        torch.testing.assert_close(
            curves_SK, selector.coverage(whole), rtol=FEW_ROUNDINGS, atol=FEW_ROUNDINGS
        )
        everyone_MSK = [torch.empty_like(curves_SK) for _ in range(MEMBERS)]
        dist.all_gather(everyone_MSK, curves_SK.contiguous())
        assert all(torch.equal(each, curves_SK) for each in everyone_MSK), name
    dist.destroy_process_group()


if __name__ == "__main__":
    compare()
