# SPDX-License-Identifier: Apache-2.0
"""The copies of a step from the host to the device."""

from __future__ import annotations

import torch
from torch import Tensor


def copied_to(host: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on ``device``, without a wait for what runs there.

    CUDA copies from pageable memory while the host waits, so the tensor is pinned first. No ring of
    buffers is needed: torch keeps freed pinned blocks by power of two, and hands one out again when
    a query of its event, which is no wait, says that the copy has ended (CachingHostAllocator.h).
    """
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
