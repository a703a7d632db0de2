# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row this rank computes: known on the host, before any token is read.

Shape legend: T tokens of this rank's share, N blocks of the row, W members of the group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from sparsebalance_megatron.attention.context_parallel.shard import deal, owned_tokens
from sparsebalance_megatron.megatron.context_groups import ContextGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class RowShare:
    """This rank's whole blocks of a row, in their order.

    Attributes:
        group: who shares the row; a group of one has all of it.
        owner_N: the member that holds each block.
        tokens_T: places in the row of this rank's tokens, ascending.
        positions_T: place of each in its document.
        padding_tokens: behind them, for sequence parallelism; of no document.
    """

    group: ContextGroup
    owner_N: np.ndarray
    tokens_T: np.ndarray
    positions_T: np.ndarray
    padding_tokens: int


def share_of_row(
    cu_seqlens: Sequence[int], group: ContextGroup, *, block_size: int, pad_to_multiple_of: int
) -> RowShare:
    """What this member of a group gets of a row, in stripes of one block.

    Args:
        cu_seqlens: document boundaries of the row, padding documents included; it has at least as
            many blocks as the group has members.
        pad_to_multiple_of: tokens that the length of a share must divide by.
    """
    owner_N = deal(row_blocks(np.diff(cu_seqlens), block_size), group.members)
    tokens_T = owned_tokens(cu_seqlens, block_size, owner_N, group.member)
    document_T = np.searchsorted(cu_seqlens, tokens_T, side="right") - 1
    return RowShare(
        group=group,
        owner_N=owner_N,
        tokens_T=tokens_T,
        positions_T=tokens_T - np.asarray(cu_seqlens)[document_T],
        padding_tokens=-len(tokens_T) % pad_to_multiple_of,
    )


def row_blocks(lengths_tokens: Sequence[int] | np.ndarray, block_size: int) -> int:
    """Blocks of a row of documents of these lengths."""
    return int((-(-np.asarray(lengths_tokens) // block_size)).sum())


def member_tokens(cu_seqlens: Sequence[int], members: int, *, block_size: int) -> np.ndarray:
    """[W] tokens that each member of a group gets of a row, without padding."""
    starts = [np.arange(*ends, block_size) for ends in pairwise(cu_seqlens)]
    length_N = np.diff(np.concatenate([*starts, cu_seqlens[-1:]]))
    return np.bincount(deal(len(length_N), members), weights=length_N, minlength=members).astype(
        int
    )
