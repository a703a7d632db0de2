# SPDX-License-Identifier: Apache-2.0
"""Copies from the host that do not make it wait."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_ALIGNED_ELEMENTS = 16
"""int64 elements in 128 bytes."""


def copied_to(host: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on ``device``, without a wait for what runs there.

    CUDA copies from pageable memory while the host waits, so the tensor is pinned first.
    """
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


def arrays_to(arrays: Mapping[str, np.ndarray], device: torch.device | str) -> dict[str, Tensor]:
    """Int64 arrays as tensors on ``device``, in one copy; all are views of one tensor.

    Each begins at a multiple of 128 bytes: Triton compiles a kernel anew for pointers that are
    aligned otherwise than before.
    """
    pieces = []
    for x in arrays.values():
        pieces += [x, np.zeros(-len(x) % _ALIGNED_ELEMENTS, dtype=np.int64)]
    copied = copied_to(torch.from_numpy(np.concatenate(pieces)), device)
    parts = copied.split([len(piece) for piece in pieces])
    return dict(zip(arrays, parts[::2], strict=True))
