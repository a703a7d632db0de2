# SPDX-License-Identifier: Apache-2.0
"""Attention of query blocks over gathered KV blocks: time and memory follow the budget.

Past blocks, and single columns where a selection has them, are gathered by
:mod:`.gathered_units`.

Shape legend: T tokens of the packed row (of queries or of keys), H query heads, G KV heads, D head
dim, N blocks of the queries' row, K places of a list.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.impl import assembled
from sparsebalance_megatron.attention.impl.gathered_units import (
    Blocks,
    GatheredUnits,
    Tokens,
    Units,
)
from sparsebalance_megatron.attention.impl.own_blocks import own_listed_QC
from sparsebalance_megatron.attention.kernel import obstacle_of_lists
from sparsebalance_megatron.attention.selection import Selection


def forward(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, selection: Selection, *, softmax_scale: float
) -> tuple[Tensor, Tensor]:
    """Attend over a selection by query block; see :class:`..kernel.Kernel`.

    Computes in float32, or float64 for float64 inputs. Deterministic on the CPU; on CUDA where
    ``torch.use_deterministic_algorithms`` makes ``index_add_`` so.
    """
    return assembled.forward(_PastBlocks, q_THD, k_TGD, v_TGD, selection, softmax_scale)


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    selection: Selection,
    *,
    softmax_scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients, as deterministic as :func:`forward`; see :class:`..kernel.Kernel`."""
    return assembled.backward(
        _PastBlocks, dout_THD, q_THD, k_TGD, v_TGD, out_THD, lse_TH, selection, softmax_scale
    )


def obstacle(q_THD: Tensor, selection: Selection) -> str | None:
    """Refuse selections by token."""
    return obstacle_of_lists(selection, by_token=False)


class _PastBlocks:
    """The past blocks of one call, and its columns."""

    def __init__(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        softmax_scale: float,
    ) -> None:
        own_NG, columns = own_listed_QC(selection), selection.columns
        # The own block comes first, and is not gathered.
        shifted_NGK = pad(selection.indices_QCK[..., 1:], (0, 1), value=-1)

        def gathered(lists_NGK: Tensor, counts_NG: Tensor, units: Units) -> GatheredUnits:
            lists = lists_NGK, counts_NG, selection.query_layout, units
            return GatheredUnits(q_THD, k_TGD, v_TGD, *lists, softmax_scale)

        self._parts = [
            gathered(
                torch.where(own_NG[..., None], shifted_NGK, selection.indices_QCK),
                selection.counts_QC - own_NG.to(selection.counts_QC.dtype),
                Blocks(layout=selection.kv_layout),
            )
        ]
        if columns is not None and columns.tokens_NGK.shape[2]:
            tokens = Tokens(count=selection.kv_layout.tokens)
            self._parts.append(gathered(columns.tokens_NGK, columns.counts_NG, tokens))

    def forward(self, out_THD: Tensor, lse_TH: Tensor) -> tuple[Tensor, Tensor]:
        for part in self._parts:
            out_THD, lse_TH = part.forward(out_THD, lse_TH)
        return out_THD, lse_TH

    def backward(
        self,
        dout_THD: Tensor,
        out_THD: Tensor,
        lse_TH: Tensor,
        dq_THD: Tensor,
        dk_TGD: Tensor,
        dv_TGD: Tensor,
    ) -> None:
        for part in self._parts:
            part.backward(dout_THD, out_THD, lse_TH, dq_THD, dk_TGD, dv_TGD)
