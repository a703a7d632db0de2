# SPDX-License-Identifier: Apache-2.0
"""What members tell one another so that every one selects as a rank that holds the row would.

Shape legend: N blocks (of a member's row or of the packed row), S documents of the packed row,
K budgets.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from sparsebalance_megatron.attention.context_parallel.shard import RowShard


@torch.no_grad()
def gather_summaries(
    summaries: Sequence[Tensor], shard: RowShard, group: dist.ProcessGroup | None
) -> list[Tensor]:
    """Put summaries of all members' blocks together, in the order of the packed row.

    One collective, whatever the number of summaries; none in a context group of one member. What
    is gathered carries no gradient.

    Args:
        summaries: of this member's blocks, one entry per block, such as pooled keys
            [N, KV heads, head dim] and pooled queries; of any dtypes.
        shard: what this member holds.
        group: the context group; all its members call at the same place of their programs.

    Returns:
        The summaries of the packed row's blocks.

    Raises:
        ValueError: a summary has not one entry for each of this member's blocks.
    """
    blocks = shard.local_layout.blocks
    if any(x.shape[0] != blocks for x in summaries):
        raise ValueError(
            f"gather_summaries: shapes {', '.join(str(tuple(x.shape)) for x in summaries)}: must "
            f"have one entry for each of the member's {blocks} blocks"
        )
    if shard.members == 1:
        return list(summaries)
    # As bytes, summaries of different dtypes travel together.
    parts = [x.reshape(blocks, -1).contiguous().view(torch.uint8) for x in summaries]
    widths = [part.shape[1] for part in parts]
    most = max(shard.owners.blocks_per_member)
    # What lies past a shorter row's end travels, and is not read.
    sent = parts[0].new_empty(most, sum(widths))
    torch.cat(parts, 1, out=sent[:blocks])
    received = sent.new_empty(shard.members * most, sum(widths))
    dist.all_gather_into_tensor(received, sent, group)
    row = received.index_select(0, shard.slot_N)
    return [
        # A copy begins where its dtype may; a slice may not.
        part.clone(memory_format=torch.contiguous_format).view(x.dtype).view(-1, *x.shape[1:])
        for part, x in zip(row.split(widths, 1), summaries, strict=True)
    ]


@torch.no_grad()
def sum_over_members(mass_SK: Tensor, shard: RowShard, group: dist.ProcessGroup | None) -> Tensor:
    """Add up what the members' queries found of every document's mass.

    Every member gets the same bits, so that all make the same curves, budgets and lists of them.

    Args:
        mass_SK: float64, sums over this member's queries; 0 for documents of which it holds none.
        shard: what this member holds.
        group: the context group.

    Raises:
        ValueError: the sums are not float64, or not of the packed row's documents.
    """
    if mass_SK.dtype != torch.float64 or mass_SK.shape[0] != shard.row_layout.documents:
        raise ValueError(
            f"sum_over_members: mass is {mass_SK.dtype} {tuple(mass_SK.shape)}: must be float64 "
            f"with one row for each of the packed row's {shard.row_layout.documents} documents"
        )
    if shard.members == 1:
        return mass_SK
    total_SK = mass_SK.clone()
    dist.all_reduce(total_SK, group=group)
    return total_SK
