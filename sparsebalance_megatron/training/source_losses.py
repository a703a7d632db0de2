# SPDX-License-Identifier: Apache-2.0
"""Losses of a micro-batch by the data set that its samples come from.

Shape legend: S samples of the micro-batch, T tokens that this rank computes of its row, X sources.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsebalance_megatron.training.data_iterator import LocalMicroBatch


def token_sources(micro_batch: LocalMicroBatch) -> np.ndarray:
    """[T] int64: the source of every token; 0 for padding, which no loss counts."""
    assert micro_batch.source_S is not None
    sources = np.zeros(micro_batch.cu_seqlens[-1], dtype=np.int64)
    of_samples = np.repeat(micro_batch.source_S, micro_batch.plan.lengths_tokens)
    sources[: len(of_samples)] = of_samples
    if micro_batch.share is None:
        return sources
    return np.pad(sources[micro_batch.share.tokens_T], (0, micro_batch.share.padding_tokens))


def losses_by_source(
    losses: Tensor, loss_mask: Tensor, micro_batch: LocalMicroBatch, sources: int
) -> Tensor | None:
    """[X, 2] float64 sums of token losses, and tokens, on the device of the losses.

    Args:
        losses: what the last stage gave, one number per token of the row, in any shape.
        loss_mask: a weight per token, in any shape.
        sources: how many data sets are mixed.

    Returns:
        None where the model gives something else than a loss per token.
    """
    if losses.numel() != loss_mask.numel():
        return None
    source_T = torch.from_numpy(token_sources(micro_batch))
    if losses.device.type == "cuda":
        # From pageable memory the copy would make the host wait.
        source_T = source_T.pin_memory()
    source_T = source_T.to(losses.device, non_blocking=True)
    mask_T = loss_mask.detach().reshape(-1).double()
    columns_T2 = torch.stack([losses.detach().reshape(-1).double() * mask_T, mask_T], dim=1)
    sums_X2 = torch.zeros(sources, 2, dtype=torch.float64, device=losses.device)
    return sums_X2.index_add_(0, source_T, columns_T2)
