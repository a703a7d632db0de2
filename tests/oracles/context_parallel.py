# SPDX-License-Identifier: Apache-2.0
"""Who holds which token of a packed sequence, one token at a time."""

from __future__ import annotations


def tokens_of_members(
    cu_seqlens: list[int], block_size: int, owners: list[int], members: int
) -> list[list[tuple[int, int, int]]]:
    """Per member the tokens it holds, as (token, document, block), numbered in the sequence."""
    held: list[list[tuple[int, int, int]]] = [[] for _ in range(members)]
    block = -1
    for document in range(len(cu_seqlens) - 1):
        for token in range(cu_seqlens[document], cu_seqlens[document + 1]):
            if (token - cu_seqlens[document]) % block_size == 0:
                block += 1
            held[owners[block]].append((token, document, block))
    return held
