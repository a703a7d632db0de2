# SPDX-License-Identifier: Apache-2.0
"""The length of documents up to which dense attention takes no longer than sparse attention."""

from bisect import bisect_left
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.work_model import features
from sparsebalance_megatron.layer_budgets import ALL_DENSE


def crossing_tokens(cost: CostModel, base_budget: int, longest_tokens: int) -> int:
    """Tokens of the longest document, in whole blocks, that dense attention takes no longer for
    than sparse attention at the base budget with its router, forward and backward, of a micro-batch
    that holds the document alone. 0 where the budget covers all such documents."""
    sparse_F, dense_F = (
        sum(cost.coefficients_ms(part, direction) for part in parts for direction in Direction)
        for parts in ((Part.ATTENTION, Part.ROUTER), (Part.DENSE_ATTENTION,))
    )

    def dense_takes_longer(blocks: int) -> bool:
        work_F = features([blocks * cost.block_size], base_budget, cost.block_size, cost.work)
        return float(np.dot(dense_F, work_F)) > float(np.dot(sparse_F, work_F))

    # Beyond the budget sparse attention grows with the length, and what dense attention takes more
    # than a router with its square: times cross once.
    lengths_blocks = range(base_budget + 1, -(-longest_tokens // cost.block_size) + 1)
    as_fast = bisect_left(lengths_blocks, True, key=dense_takes_longer)
    return (base_budget + as_fast) * cost.block_size if as_fast else 0


def check_dense_length(config: SparseBalanceConfig, longest_tokens: int) -> None:
    """Refuse a length up to which documents are dense beyond the longest."""
    if config.dense_up_to_tokens > longest_tokens:
        raise ConfigError(
            f"{flag_name('dense_up_to')} {config.dense_up_to}: the longest sample has "
            f"{longest_tokens} tokens; give no more, or auto"
        )


def with_dense_length(
    config: SparseBalanceConfig, cost: CostModel, longest_tokens: int
) -> SparseBalanceConfig:
    """The choices with a number in place of ``dense_up_to`` auto: 0 for kernels that were named for
    their lists; and with the kernels that the costs were measured with in place of auto."""
    if config.attention == "auto" != cost.list_kernel:
        config = replace(config, attention=cost.list_kernel)
    if config.dense_attention == "auto" and cost.dense_kernel is not None:
        config = replace(config, dense_attention=cost.dense_kernel)
    if config.dense_up_to != "auto":
        return config
    tokens = (
        0 if config.attends_by_lists else crossing_tokens(cost, config.base_budget, longest_tokens)
    )
    return replace(config, dense_up_to=str(tokens))


def dense_length_line(config: SparseBalanceConfig, cost: CostModel, longest_tokens: int) -> str:
    """Which documents are attended to densely, and whether costs would have it otherwise."""
    if config.layer_budgets == ALL_DENSE:
        return "documents of every length are attended to densely"
    tokens = max(config.dense_up_to_tokens, config.base_budget * cost.block_size)
    now = with_dense_length(replace(config, dense_up_to="auto"), cost, longest_tokens)
    text = f"documents of up to {tokens:,} tokens are attended to densely"
    if now.dense_up_to_tokens == config.dense_up_to_tokens:
        return f"{text}: up to there that takes no longer ({cost.source})"
    otherwise = max(now.dense_up_to_tokens, config.base_budget * cost.block_size)
    return (
        f"{text} ({flag_name('dense_up_to')} {config.dense_up_to}); by its times it would be "
        f"{otherwise:,} here ({cost.source})"
    )
