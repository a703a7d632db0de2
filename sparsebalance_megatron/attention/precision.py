# SPDX-License-Identifier: Apache-2.0
"""Products in the precision of their operands, whatever a training loop has switched on."""

from __future__ import annotations

import warnings

import torch


def outside_autocast(device: torch.device) -> torch.autocast:
    """A context in which ``torch.autocast`` changes no dtype."""
    return torch.autocast(device.type, enabled=False)


def warn_of_tf32(device: torch.device) -> None:
    """Warn where float32 products on CUDA take TF32 operands, of 10 bits of mantissa.

    That is a setting of the whole process, which cannot be changed for one call without changing it
    for other threads.
    """
    if device.type == "cuda" and _tf32_is_on():
        warnings.warn(
            "float32 products use TF32 (torch.backends.cuda.matmul): blocks are selected by scores "
            "of less precision, and a run may select otherwise than with TF32 off",
            stacklevel=3,
        )


def _tf32_is_on() -> bool:
    matmul = torch.backends.cuda.matmul
    # The older name raises where the newer one was set.
    return getattr(matmul, "fp32_precision", "") == "tf32" or (
        not hasattr(matmul, "fp32_precision") and matmul.allow_tf32
    )
