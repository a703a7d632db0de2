# SPDX-License-Identifier: Apache-2.0
"""Process groups of the ranks that share a row: made once, by all ranks in the same order.

A row lies on 1, 2, 4, ... neighbouring ranks of those that differ in their data-parallel and
context-parallel place alone. Neighbours of so many begin at a multiple of their number, so that
every rank is in one group per width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, PlanError


@dataclass(frozen=True, kw_only=True)
class ContextGroup:
    """The ranks that share one row, of which this is ``member`` of ``members``.

    ``alone`` is a group of this rank by itself.
    """

    process_group: ProcessGroup
    alone: ProcessGroup
    member: int
    members: int


@dataclass(frozen=True, kw_only=True)
class ContextGroups:
    """Every group that this rank is in.

    ``rank`` counts data-parallel and context-parallel ranks together, as plans do. ``by_width``
    begins with the rank alone. ``agreement`` holds all ranks that may share a row with this one,
    over a backend of the host.
    """

    rank: int
    by_width: Mapping[int, ProcessGroup]
    agreement: ProcessGroup

    def of_slot(self, slot: MicroBatchPlan) -> ContextGroup:
        """The group that runs a slot of this rank.

        Raises:
            PlanError: no such group was made.
        """
        if slot.width not in self.by_width or slot.rank % slot.width:
            raise PlanError(
                f"micro-batch {slot.position} lies on ranks {slot.rank} to "
                f"{slot.rank + slot.width - 1}: groups of 1, 2, ... {max(self.by_width)} ranks "
                "begin at a multiple of their size"
            )
        return ContextGroup(
            process_group=self.by_width[slot.width],
            alone=self.by_width[1],
            member=self.rank - slot.rank,
            members=slot.width,
        )


def make_context_groups(max_width: int, *, timeout_minutes: float) -> ContextGroups:
    """Make the groups; collective over all ranks, once Megatron's own exist.

    Args:
        max_width: ranks of the widest row, a power of two that divides the data-parallel times
            context-parallel size.
        timeout_minutes: after which a rank that waits in vain for another member fails.
    """
    neighbours = parallel_state.get_data_parallel_group(with_context_parallel=True)
    own = torch.distributed.get_process_group_ranks(neighbours)
    found: list[list[int]] = [[]] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, own)
    timeout = timedelta(minutes=timeout_minutes)
    everyone = sorted(set(map(tuple, found)))
    widths = [1 << power for power in range(max_width.bit_length())]
    by_width = {width: _own_group(everyone, width, timeout) for width in widths}
    return ContextGroups(
        rank=own.index(torch.distributed.get_rank()),
        by_width=by_width,
        agreement=_own_group(everyone, max_width, timeout, backend="gloo"),
    )


def _own_group(
    everyone: Sequence[Sequence[int]], width: int, timeout: timedelta, backend: str | None = None
) -> ProcessGroup:
    """The group of ``width`` neighbours that this rank is in; all ranks make all of them."""
    rank = torch.distributed.get_rank()
    own: ProcessGroup | None = None
    for neighbours in everyone:
        for first in range(0, len(neighbours), width):
            members = list(neighbours[first : first + width])
            group = torch.distributed.new_group(members, timeout=timeout, backend=backend)
            if rank in members:
                own = group
    if own is None:
        raise PlanError(f"rank {rank} is in no group of {width} data-parallel ranks")
    return own
