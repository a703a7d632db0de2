# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention behind the attention interface of Hugging Face models.

Shape legend: B rows of a batch, Q query tokens of a row, T tokens of a row with those of the cache.
"""

import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from sparsebalance_megatron.attention.api import (
    attends_densely,
    block_sparse_attention,
    dense_attention,
)
from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.select import Selector, selector_named
from sparsebalance_megatron.attention.select.summaries import BlockSummaries
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.evaluate.settings import settings_of


def sparse_balance_attention(
    module: torch.nn.Module,
    query_BHSD: Tensor,
    key_BGTD: Tensor,
    value_BGTD: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **features: Any,
) -> tuple[Tensor, None]:
    """Attend as in training, at the model's base budgets; for ``transformers``.

    Every document of a batch selects for itself. Tokens after a cache select as they would in one
    pass over all tokens; selections that would need queries of the cache's tokens are refused.

    Args:
        module: the attention layer, with ``config`` and ``layer_idx``.
        attention_mask: int64 [B, Q], what :func:`document_starts` gives.
        scaling: factor on q . k, None for 1 / sqrt(D).
        features: what else a model asks its attention for.

    Returns:
        [B, Q, H, D], 0 for padding; and None, since no weights are kept.

    Raises:
        ConfigError: the model or the settings ask for something else.
    """
    starts_BQ = _checked_mask(attention_mask, dropout, features)
    _check_positions(features.get("position_ids"), starts_BQ, key_BGTD.shape[2])
    settings = settings_of(module.config)
    selector = selector_named(settings.sparse_selection, first_blocks=settings.sparse_init_block)
    q_BQHD, k_BTGD, v_BTGD = (x.transpose(1, 2) for x in (query_BHSD, key_BGTD, value_BGTD))
    (batch, asked), tokens = q_BQHD.shape[:2], k_BTGD.shape[1]
    q_BTHD = q_BQHD
    if asked < tokens:
        if asks_with_earlier_queries(selector):
            raise ConfigError(
                f"sparse_balance: selection {settings.sparse_selection} reads by the queries of "
                "the block before, which a cache does not hold; use use_cache=False"
            )
        # Queries of the tokens in the cache decide nothing.
        q_BTHD = torch.nn.functional.pad(q_BQHD, (0, 0, 0, 0, tokens - asked, 0))
        layouts, kept_T, asking_T = _last_blocks(
            *(batch, asked, tokens, settings.sparse_block_size), q_BQHD.device
        )
    else:
        layouts, kept_T, asking_T = _whole_rows(starts_BQ, settings.sparse_block_size)
    q_THD, k_TGD, v_TGD = (x.flatten(0, 1)[kept_T] for x in (q_BTHD, k_BTGD, v_BTGD))
    kv_layout, asking_THD = layouts.kv_layout, q_THD[asking_T]
    softmax_scale = q_THD.shape[-1] ** -0.5 if scaling is None else scaling
    layer = cast("int", module.layer_idx)
    lengths_tokens = kv_layout.grid.tokens_S.tolist()
    budgets = [settings.budget_blocks(layer, length) for length in lengths_tokens]
    inputs = asking_THD, k_TGD, v_TGD
    everything = all(map(operator.ge, budgets, kv_layout.blocks_per_document))
    if everything and asked == tokens and attends_densely(q_THD, v_TGD, kv_layout, "auto"):
        out_THD, _ = dense_attention(*inputs, kv_layout, softmax_scale=softmax_scale)
    else:
        if everything:
            selection = Selection.of_everything(layouts, k_TGD.shape[1])
        else:
            ranking = selector.rank(
                *(asking_THD, selector.summaries(q_THD, k_TGD, kv_layout), layouts),
                softmax_scale=softmax_scale,
                max_budget=max(budgets),
                observe=False,
            )
            selection = selector.select(ranking, torch.tensor(budgets, device=q_THD.device))
        out_THD, _ = block_sparse_attention(*inputs, selection, softmax_scale=softmax_scale)
    place_T, shape = kept_T[asking_T], q_BTHD.flatten(0, 1).shape
    out_THD = out_THD.new_zeros(shape).index_copy(0, place_T, out_THD)
    return out_THD.unflatten(0, (batch, -1))[:, -asked:], None


def _whole_rows(starts_BQ: Tensor, block_size: int) -> tuple[LayoutPair, Tensor, Tensor]:
    """All blocks, which ask; a batch's tokens without padding; those of them that ask."""
    row_B1 = torch.arange(len(starts_BQ), device=starts_BQ.device)[:, None]
    start_T = (starts_BQ + row_B1 * starts_BQ.shape[1])[starts_BQ != PADDING]
    lengths_tokens = torch.unique_consecutive(start_T, return_counts=True)[1]
    cu_seqlens = (0, *lengths_tokens.cumsum(0).tolist())
    layout = packed_layout(cu_seqlens, block_size, starts_BQ.device)
    kept_T = (starts_BQ.flatten() != PADDING).nonzero()[:, 0]
    return LayoutPair.within(layout), kept_T, torch.arange(len(kept_T), device=kept_T.device)


def _last_blocks(
    batch: int, asked: int, tokens: int, block_size: int, device: torch.device
) -> tuple[LayoutPair, Tensor, Tensor]:
    """As :func:`_whole_rows`: the blocks of each row, which is one document, that hold its last
    ``asked`` tokens ask."""
    first_block = (tokens - asked) // block_size
    first, blocks = first_block * block_size, -(-tokens // block_size)
    kept_T = torch.arange(batch * tokens, device=device)
    layouts = LayoutPair.of_blocks(
        packed_layout(range(0, batch * (tokens - first) + 1, tokens - first), block_size, device),
        packed_layout(range(0, batch * tokens + 1, tokens), block_size, device),
        [row * blocks + block for row in range(batch) for block in range(first_block, blocks)],
    )
    return layouts, kept_T, kept_T.view(batch, tokens)[:, first:].flatten()


def asks_with_earlier_queries(selector: Selector[Any, Any]) -> bool:
    """Whether queries of earlier tokens decide what a token reads; a cache holds only keys."""
    one_1HD = torch.zeros(1, 1, 16)
    summary = selector.summaries(one_1HD, one_1HD, packed_layout((0, 1), 1, one_1HD.device))
    return not isinstance(summary, BlockSummaries) or summary.queries_NCD is not None


def _checked_mask(mask: Tensor | None, dropout: float, features: dict[str, Any]) -> Tensor:
    """The mask, once everything that would be ignored is refused."""
    if dropout:
        raise ConfigError(f"sparse_balance: attention dropout {dropout} is not supported")
    for name, meaning in (
        ("s_aux", "attention sinks"),
        ("softcap", "softcapped scores"),
        ("sliding_window", "sliding windows"),
        ("position_bias", "position biases"),
    ):
        if features.get(name) is not None:
            raise ConfigError(f"sparse_balance: {meaning} are not supported")
    if mask is None or mask.ndim != 2 or mask.dtype != torch.int64:
        raise ConfigError(
            "sparse_balance: the model was given a mask of its own; give attention_mask as "
            "[rows, tokens], or none"
        )
    return mask


def _check_positions(positions_BQ: Tensor | None, starts_BQ: Tensor, tokens: int) -> None:
    """Refuse positions that start again inside a document of the mask.

    Where it has a cache or an attention_mask, ``transformers`` looks for no packed documents.
    """
    if positions_BQ is None or positions_BQ.ndim != 2:
        return
    first = tokens - positions_BQ.shape[1]
    before_BQ = torch.nn.functional.pad(positions_BQ, (1, -1), value=0 if first else -1)
    place_Q = torch.arange(first, tokens, device=starts_BQ.device)
    inside_BQ = (starts_BQ != PADDING) & (starts_BQ != place_Q)
    if (inside_BQ & (positions_BQ <= before_BQ)).any():
        raise ConfigError(
            "sparse_balance: position_ids start again inside what the mask calls one document, "
            "which would read across documents; give packed documents with use_cache=False and "
            "without attention_mask, or one document a row"
        )


PADDING = -1
"""Stands for the document of a padding token."""


def document_starts(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    *,
    mask_function: Callable[..., Any],
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> Tensor:
    """Find the first token of every query's document: int64 [B, Q], :data:`PADDING` for padding.

    A mask function of ``transformers``, which calls it once per forward pass.

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
        allowed = mask_function(row_B1, torch.zeros_like(row_B1), query_1Q, key_BQ)
        return torch.as_tensor(allowed, device=device).expand(batch_size, q_length)

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
