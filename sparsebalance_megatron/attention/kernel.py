# SPDX-License-Identifier: Apache-2.0
"""What every implementation of attention offers.

Shape legend: T tokens of the packed row (of queries or of keys, which may differ), H query heads,
G KV heads, D head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from sparsebalance_megatron.attention.selection import Selection


@dataclass(frozen=True, kw_only=True, eq=False)
class Saved:
    """What a forward pass read and gave, for the backward pass.

    ``out_THD`` and ``lse_TH`` may be those of several parts, put together by
    :func:`.merge.merge_partials`: the gradients of the parts then add up to the gradients of
    attention over the union of their lists.
    """

    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    out_THD: Tensor
    lse_TH: Tensor
    selection: Selection
    softmax_scale: float


class Kernel(Protocol):
    """A module ``attention/impl/<name>``.

    Its functions are called with tensors that fit the selection, and only where ``obstacle`` finds
    nothing. Autograd sees none of them.
    """

    def forward(
        self,
        q_THD: Tensor,
        k_TGD: Tensor,
        v_TGD: Tensor,
        selection: Selection,
        *,
        softmax_scale: float,
    ) -> tuple[Tensor, Tensor]:
        """Attend over the lists.

        Returns:
            out_THD in the inputs' dtype, and lse_TH: the natural log-sum-exp of the scaled scores
            that were read, in float32 (float64 for float64 inputs). A query that reads nothing has
            out 0 and lse -inf.
        """

    def backward(self, dout_THD: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v in their dtypes."""

    def obstacle(self, q_THD: Tensor, selection: Selection) -> str | None:
        """Say why the implementation does not serve, and the remedy; None where it serves."""


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums of ``dtype`` take: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def obstacle_of_lists(selection: Selection, *, by_token: bool) -> str | None:
    """Say that an implementation serves the other kind of selection only."""
    if selection.by_token and not by_token:
        return 'serves selections by query block, not by token: use "tokens" or "auto"'
    if by_token and not selection.by_token:
        return 'serves selections by token, not by query block: use "auto"'
    return None
