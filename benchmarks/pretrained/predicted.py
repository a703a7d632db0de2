# SPDX-License-Identifier: Apache-2.0
"""What a layer's attention with wishes is predicted to take on a GPU, from counted work.

Nothing here was timed with wishes. Assumed:

1. A layer of 16 query heads on 2 KV heads of 128 channels, blocks of 256 tokens, forward and
   backward, on an H200.
2. Dense attention takes 110 ms at 65,536 tokens, in proportion to the square of the length.
3. A list that a block of queries shares takes 1.37 ms at 65,536 tokens, in proportion to the
   length, and 4.55 us a block pair. Both fit the times of ``research/kernels.md``.
4. Scores of all past tokens are one of the seven products of dense attention and run at its rate.
   Half of the channels are half of it, and FP8 has twice the rate. Maxima by block are hidden.
5. Making the entries of tiles takes 2 ms at 65,536 tokens. Where rows of a list begin to read it at
   tokens of their own, attention takes a tenth longer.
6. A wish of a token and head takes what an entry of a token's own list does: 11.9 us for all heads
   and 256 tokens, and 10.9 ms at 65,536 tokens whatever their number.
7. Wishes a tile, or a token and head, are as many as in the documents that were read, whose blocks
   are of 32 or 64 tokens and whose KV heads have 3 query heads.

Shape legend: L layers.
"""

from collections.abc import Sequence

from pretrained.arms import ALL, EXACT, FP8, HALF, HALF_FP8, Arm
from sparsebalance_megatron.layer_budgets import DENSE

LONG_TOKENS, LONG_BLOCK = 65_536, 256
DENSE_MS, LIST_MS, PAIR_MS = 110.0, 1.37, 4.55e-3
SCORES_MS = DENSE_MS / 7
SCORE_SHARE = {EXACT: 1.0, HALF: 1 / 2, FP8: 1 / 2, HALF_FP8: 1 / 4}
ENTRIES_MS, TILE_FACTOR = 2.0, 1.1
TOKEN_WISHES_MS, TOKEN_PAIR_MS = 10.9, 11.9e-3


def predicted_ms(
    arm: Arm, budgets: Sequence[int], wishes_L: Sequence[float], tokens: int = LONG_TOKENS
) -> float | None:
    """Milliseconds of a layer's attention, the mean over layers; None of an arm that is neither
    dense nor by lists that blocks of queries share.

    Args:
        budgets: blocks by layer, or DENSE.
        wishes_L: entries that wishes add, by layer: a tile, or a token and head; none without.
    """
    if arm.selection not in (ALL, "previous-block"):
        return None
    wishes_L = wishes_L or [0.0] * len(budgets)
    layers = [
        _layer_ms(arm, budget, wishes, tokens)
        for budget, wishes in zip(budgets, wishes_L, strict=True)
    ]
    return sum(layers) / len(layers)


def _layer_ms(arm: Arm, budget: int, wishes: float, tokens: int) -> float:
    length = tokens / LONG_TOKENS
    if budget == DENSE:
        return DENSE_MS * length**2
    blocks = tokens // LONG_BLOCK
    in_tiles = arm.wishes is not None and arm.wishes.tile_of(LONG_BLOCK) > 0
    read = min(blocks, budget + wishes * in_tiles)
    # Block n of a document sees n + 1 blocks.
    pairs = blocks * read - read * (read - 1) / 2
    attention = LIST_MS * length + PAIR_MS * pairs
    if arm.wishes is None:
        return attention
    scores = SCORES_MS * SCORE_SHARE[arm.wishes.scores] * length**2
    if in_tiles:
        return attention * TILE_FACTOR + scores + ENTRIES_MS * length
    by_token = TOKEN_WISHES_MS * length + TOKEN_PAIR_MS * wishes * blocks
    return attention + scores + by_token
