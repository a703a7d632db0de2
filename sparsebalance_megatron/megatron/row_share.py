# SPDX-License-Identifier: Apache-2.0
"""Which tokens of a row this rank computes: known on the host, before any token is read.

Shape legend: T tokens of this rank's share, S documents of the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.attention.context_parallel.block_owners import BlockOwners, dealt_row
from sparsebalance_megatron.megatron.context_groups import ContextGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class RowShare:
    """This rank's whole blocks of a row, in their order.

    Attributes:
        group: who shares the row; a group of one has all of it.
        owners: who has which block.
        tokens_T: places in the row of this rank's tokens, ascending.
        positions_T: place of each in its document.
        padding_tokens: behind them, for sequence parallelism; of no document.
    """

    group: ContextGroup
    owners: BlockOwners
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
    owners = dealt_row(cu_seqlens, block_size, group.members)
    tokens_T = owners.tokens_of(group.member)
    starts_S = np.asarray(cu_seqlens)
    document_T = np.searchsorted(starts_S, tokens_T, side="right") - 1
    return RowShare(
        group=group,
        owners=owners,
        tokens_T=tokens_T,
        positions_T=tokens_T - starts_S[document_T],
        padding_tokens=-len(tokens_T) % pad_to_multiple_of,
    )


def member_tokens(cu_seqlens: Sequence[int], members: int, *, block_size: int) -> tuple[int, ...]:
    """Tokens that each member of a group gets of a row, without padding."""
    return dealt_row(cu_seqlens, block_size, members).tokens_per_member
