# SPDX-License-Identifier: Apache-2.0
"""Chooses whether Triton kernels or torch compute the router. Every such choice is made here."""

from __future__ import annotations

import importlib.util
import warnings

import torch

from sparsebalance_megatron.attention.layout import LayoutPair
from sparsebalance_megatron.config import Router

MOST_BLOCKS = 1024
"""Blocks of a document whose sort was compiled and seen to stay in registers."""


def means_in_triton(router: Router, device: torch.device) -> bool:
    """Whether means over blocks come from the kernel; see :func:`ranks_in_triton`.

    Raises:
        ValueError: ``router`` is "triton", and it does not serve.
    """
    return _chosen(router, device, _obstacle_of_device(device))


def ranks_in_triton(
    router: Router, device: torch.device, layouts: LayoutPair, *, softmax_scale: float
) -> bool:
    """Whether rows of scores are ranked by the kernel.

    "auto" takes it wherever it serves on CUDA, and warns where it does not; "torch" never takes it.
    Interpreted kernels serve on the CPU, where only "triton" takes them.

    Raises:
        ValueError: ``router`` is "triton", and it does not serve.
    """
    obstacle = _obstacle_of_device(device)
    if obstacle is None and layouts.kv_layout.max_blocks > MOST_BLOCKS:
        obstacle = (
            f"ranks documents of up to {MOST_BLOCKS} blocks, not {layouts.kv_layout.max_blocks}: "
            "take larger blocks"
        )
    if obstacle is None and not softmax_scale > 0.0:
        obstacle = f"needs a positive softmax scale, not {softmax_scale}"
    return _chosen(router, device, obstacle)


def _chosen(router: Router, device: torch.device, obstacle: str | None) -> bool:
    if router == "torch":
        return False
    if obstacle is None:
        return router == "triton" or device.type == "cuda"
    if router == "triton":
        raise ValueError(f'router "triton" {obstacle}; or use "torch" or "auto"')
    if device.type == "cuda":
        warnings.warn(f'router "auto" takes "torch" on CUDA: "triton" {obstacle}', stacklevel=3)
    return False


def _obstacle_of_device(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if device.type == "cuda":
        return None
    import triton

    if triton.knobs.runtime.interpret:
        return None
    return f"needs CUDA, and the keys lie on {device}"
