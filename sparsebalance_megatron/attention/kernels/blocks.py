# SPDX-License-Identifier: Apache-2.0
"""Attention of query blocks over the blocks and columns of their lists, on any device.

Shape legend: T tokens of the packed sequence (of queries or of keys), H query heads, G KV heads, D
head dim of keys, F of values, N blocks of the queries, K places of a list.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.kernels.assembled import AssembledKernel
from sparsebalance_megatron.attention.kernels.gathered import GatheredLists, own_listed_QC
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection


def _past_blocks(
    q_THD: Tensor, k_TGD: Tensor, v_TGF: Tensor, selection: Selection, softmax_scale: float
) -> list[GatheredLists]:
    """Past blocks, and columns where there are any."""
    own_NG, columns = own_listed_QC(selection), selection.columns
    # The own block comes first, and is left out.
    lists_NGK = selection.indices_QCK.int()
    lists_NGK = torch.where(own_NG[..., None], pad(lists_NGK[..., 1:], (0, 1), value=-1), lists_NGK)
    counts_NG = selection.counts_QC - own_NG.to(selection.counts_QC.dtype)

    def part(lists_NGK: Tensor, counts_NG: Tensor, units: PackedLayout | None) -> GatheredLists:
        lists = lists_NGK, counts_NG, selection.query_layout, units
        return GatheredLists(q_THD, k_TGD, v_TGF, *lists, softmax_scale)

    parts = [part(lists_NGK, counts_NG, selection.kv_layout)]
    if columns is not None and columns.tokens_NGK.shape[2]:
        parts.append(part(columns.tokens_NGK, columns.counts_NG, None))
    return parts


_KERNEL = AssembledKernel(past_blocks=_past_blocks, by_token=False)
forward, backward, obstacle = _KERNEL.forward, _KERNEL.backward, _KERNEL.obstacle
