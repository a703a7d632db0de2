# SPDX-License-Identifier: Apache-2.0
"""Copies from the host that do not make it wait."""

from __future__ import annotations

import torch
from torch import Tensor


def copied_to(host: Tensor, device: torch.device | str) -> Tensor:
    """A tensor of the host on ``device``, without a wait for what runs there.

    CUDA copies from pageable memory while the host waits, so the tensor is pinned first.
    """
    if torch.device(device).type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)
