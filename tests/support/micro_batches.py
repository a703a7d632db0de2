# SPDX-License-Identifier: Apache-2.0
"""Micro-batches as Megatron's attention gets them."""

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from sparsebalance_megatron.attention.sequence.slice import SequenceSlice
from sparsebalance_megatron.megatron.packed_seq_params import (
    BudgetedPackedSeqParams,
    local_micro_batches,
)
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

CPU = torch.device("cpu")
BLOCK = 16


def params_with(
    lengths: Sequence[int],
    budgets_LS: np.ndarray,
    *,
    padding: int = 0,
    device: torch.device = CPU,
    step: int = -1,
    dense: Sequence[int] = (),
    sequence: SequenceSlice | None = None,
) -> BudgetedPackedSeqParams:
    """A sequence of all samples, observed; ``padding`` tokens are one more document. ``dense``: so
    many first documents each layer attends to densely; ``sequence``: what this rank holds."""
    plan = MicroBatchPlan(
        samples=tuple(range(len(lengths))),
        lengths_tokens=tuple(lengths),
        budgets_LS=budgets_LS,
        rank=0,
        position=0,
        dense_documents_L=np.array(dense, dtype=np.int32),
    )
    boundaries = tuple(accumulate([*lengths, *([padding] if padding else [])], initial=0))
    (micro_batch,) = local_micro_batches(
        plan, boundaries, [sequence], block_size=BLOCK, observe=True, device=device, step=step
    )
    return micro_batch.params()
