# SPDX-License-Identifier: Apache-2.0
"""Block pairs counted one token pair at a time, and predictions summed one term at a time."""


def attended_token_pairs(
    tokens: int, budget_blocks: float, block_size: int, *, causal: bool = True
) -> int:
    """Pairs of a query and a key that it may read, of ``budget_blocks`` blocks: its own, up to the
    query or as long as it is, and whole earlier ones."""
    pairs = 0
    for query in range(tokens):
        own_block = query // block_size
        last_read = query if causal else min(tokens, (own_block + 1) * block_size) - 1
        pairs += last_read + 1 - own_block * block_size
        pairs += int(min(budget_blocks - 1, own_block)) * block_size
    return pairs


def attended_block_pairs(tokens: int, budget_blocks: float, block_size: int) -> float:
    """Token pairs of whole blocks that a kernel computes, in units of pairs of blocks."""
    return attended_token_pairs(tokens, budget_blocks, block_size, causal=False) / block_size**2


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
