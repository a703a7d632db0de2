# SPDX-License-Identifier: Apache-2.0
"""The mask that Hugging Face models hand to the sparse attention: where documents begin.

Shape legend: B rows of a batch, Q query tokens, T tokens of a row with those of the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.errors import ConfigError

PADDING = -1
"""Stands for the document of a padding token."""


def document_starts(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor:
    """Find the first token of every query's document: int64 [B, Q], :data:`PADDING` for padding.

    A mask function of ``transformers`` (``AttentionMaskInterface``), which calls it once per
    forward pass.

    Args:
        mask_function: whether a query may read a key, by (row, head, query, key).
        attention_mask: bool [B, T], False for padding.

    Raises:
        ConfigError: padding lies elsewhere than at the ends of rows, or in a cache; the cache has
            room for more tokens; or the mask is not that of causal attention within documents.
    """
    first = int(q_offset)
    if int(kv_offset) or kv_length != first + q_length:
        raise ConfigError(
            f"sparse_balance: the cache holds keys {int(kv_offset)} to {kv_length} for queries "
            f"{first} to {first + q_length}; use a cache that grows (DynamicCache, the default)"
        )
    query_1Q = torch.arange(first, first + q_length, device=device)[None]
    row_B1 = torch.arange(batch_size, device=device)[:, None]

    def may_read(key_BQ: Tensor) -> Tensor:
        """Whether each query may read its key, bool [B, Q]."""
        shape = (batch_size, q_length)
        if mask_function is None:
            return (key_BQ <= query_1Q).expand(shape)
        allowed = mask_function(row_B1, torch.zeros_like(row_B1), query_1Q, key_BQ)
        return torch.as_tensor(allowed, device=device).expand(shape)

    begins_BQ = ~may_read((query_1Q - 1).clamp(min=0)) | (query_1Q == 0)
    starts_BQ = torch.where(begins_BQ, query_1Q, 0).cummax(1).values
    last_1Q = (query_1Q + 1).clamp(max=kv_length - 1)
    looks_ahead_BQ = may_read(last_1Q) & (last_1Q > query_1Q)
    if not may_read(starts_BQ).all() or looks_ahead_BQ.any():
        raise ConfigError(
            "sparse_balance: the model asks for a mask that is not causal attention within "
            "documents; sliding windows, chunks and bidirectional attention are not supported"
        )
    if attention_mask is None:
        return starts_BQ
    return starts_BQ.masked_fill(_padding(attention_mask, kv_length)[:, first:], PADDING)


def _padding(attention_mask: Tensor, kv_length: int) -> Tensor:
    """Where padding lies, bool [B, T]."""
    kept_BT = attention_mask.bool()
    place_T = torch.arange(kv_length, device=kept_BT.device)
    at_end_BT = place_T >= kept_BT.sum(1, keepdim=True)
    if kept_BT.shape[1] != kv_length or not torch.equal(kept_BT, ~at_end_BT):
        raise ConfigError(
            "sparse_balance: a row of the batch has padding before its last token. Blocks are "
            "counted from the start of a row, so such padding would change what tokens read: pad "
            "on the right (tokenizer.padding_side='right'), and generate rows of unequal length "
            "one by one"
        )
    return at_end_BT
