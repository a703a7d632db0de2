# SPDX-License-Identifier: Apache-2.0
"""Attention over two disjoint lists of keys, put together."""

from __future__ import annotations

import torch
from torch import Tensor


def merge_partials(
    out_a_THF: Tensor, lse_a_TH: Tensor, out_b_THF: Tensor, lse_b_TH: Tensor
) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint lists, from the parts' outputs and LSEs.

    An empty list is out 0, lse -inf; so is the union of two empty lists. Differentiable in all
    four, with finite gradients everywhere.

    Returns:
        out_THF in the dtype of ``out_a_THF``, and lse_TH (natural log) in the dtype of the LSEs.
    """
    peak_TH = torch.maximum(lse_a_TH, lse_b_TH).detach()
    peak_TH = peak_TH.masked_fill(peak_TH == -torch.inf, 0.0)
    weight_a_TH = torch.exp(lse_a_TH - peak_TH)
    weight_b_TH = torch.exp(lse_b_TH - peak_TH)
    total_TH = weight_a_TH + weight_b_TH
    empty_TH = total_TH == 0.0
    total_TH = total_TH.masked_fill(empty_TH, 1.0)
    share_a_TH1 = (weight_a_TH / total_TH).unsqueeze(-1)
    share_b_TH1 = (weight_b_TH / total_TH).unsqueeze(-1)
    out_THF = share_a_TH1 * out_a_THF + share_b_TH1 * out_b_THF
    lse_TH = (peak_TH + torch.log(total_TH)).masked_fill(empty_TH, -torch.inf)
    return out_THF.to(out_a_THF.dtype), lse_TH
