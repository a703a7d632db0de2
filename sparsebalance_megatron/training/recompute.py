# SPDX-License-Identifier: Apache-2.0
"""What a run says at its start about attention in recomputed layers, and what keeping it takes."""

from __future__ import annotations

import torch

from sparsebalance_megatron.config import flag_name
from sparsebalance_megatron.megatron.kept_attention import bytes_per_token
from sparsebalance_megatron.training.inputs import CostedInputs


def recompute_line(inputs: CostedInputs) -> str | None:
    """One line for the log; None where there is nothing to say."""
    settings, config = inputs.settings, inputs.config
    max_row_tokens = inputs.policy.max_tokens_per_slot
    keeps, flag = config.recompute_attention == "keep", flag_name("recompute_attention")
    if not (settings.recompute_all or settings.recompute_attention):
        return f"{flag} keep: no layer is recomputed, nothing is kept" if keeps else None
    shape = settings.shape
    heads = shape.num_attention_heads // shape.tensor_parallel_size
    groups = max(1, shape.num_query_groups // shape.tensor_parallel_size)
    scores = inputs.cost.work.scores_per_visible_pair(heads, groups, config.block_size)
    parts = bytes_per_token(
        heads=heads,
        head_dim=shape.head_dim,
        itemsize=getattr(torch, settings.dtype).itemsize,
        # A row of scores is a list: so many for the tokens of a block.
        listing_heads=scores / config.block_size,
        budget=min(config.base_budget, -(-max_row_tokens // config.block_size)),
    )
    if not settings.recompute_all:
        # The output projection holds its input, whatever is recomputed before it.
        del parts["output"]
    total = sum(parts.values())
    each = ", ".join(f"{name} {size:,.0f}" for name, size in parts.items())
    text = (
        f"{total:,.0f} bytes per token and layer ({each}; lists at the base budget), up to "
        f"{total * max_row_tokens / 2**20:,.1f} MiB per layer and micro-batch in flight"
    )
    if keeps:
        return f"recomputed layers keep their attention until backward has used it: {text}"
    return f"recomputed layers attend again in backward; {flag} keep would take {text}"
