# SPDX-License-Identifier: Apache-2.0
"""Losses that Megatron's re-run machinery should see; loads no ``megatron.training``."""

from __future__ import annotations

import torch
from megatron.core.rerun_state_machine import get_rerun_state_machine
from torch import Tensor


def validate_loss(loss: Tensor) -> None:
    """Hand a loss to Megatron's re-run machinery, which decides what NaN and Inf mean."""
    for test, what in ((torch.isnan, "NaN"), (torch.isinf, "Inf")):
        get_rerun_state_machine().validate_result(
            result=loss,
            rejection_func=test,
            message=f"found {what} in local forward loss calculation",
            tolerance=0.0,
            fatal=True,
        )
