# SPDX-License-Identifier: Apache-2.0
"""Block pairs counted one token pair at a time, and predictions summed one term at a time."""


def attended_block_pairs(tokens: int, budget_blocks: float, block_size: int) -> float:
    """Token pairs between a query and the KV blocks it may read, in units of whole blocks.

    A query may read ``budget_blocks`` blocks: its own, as long as it is, and whole earlier ones.
    """
    token_pairs = 0
    for query in range(tokens):
        own_block = query // block_size
        own_tokens = sum(1 for token in range(tokens) if token // block_size == own_block)
        earlier_blocks = 0
        while earlier_blocks < own_block and earlier_blocks + 1 < budget_blocks:
            earlier_blocks += 1
        token_pairs += earlier_blocks * block_size + own_tokens
    return token_pairs / block_size**2


def micro_batch_ms(
    lengths_tokens: list[int],
    budgets_blocks: list[float],
    block_size: int,
    ms_per_unit: tuple[float, ...],
) -> float:
    """Affine cost of a micro-batch; the units are those of the package's feature order."""
    per_micro_batch, per_sequence, per_token, per_pair, per_visible_pair = ms_per_unit
    total = per_micro_batch
    for tokens, budget in zip(lengths_tokens, budgets_blocks, strict=True):
        total += per_sequence + per_token * tokens
        total += per_pair * attended_block_pairs(tokens, budget, block_size)
        total += per_visible_pair * attended_block_pairs(tokens, float("inf"), block_size)
    return total
