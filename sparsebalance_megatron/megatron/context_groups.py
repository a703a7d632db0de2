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
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from sparsebalance_megatron.attention.context_parallel.all_gather import AllGatherExchange
from sparsebalance_megatron.attention.context_parallel.exchange import Exchange
from sparsebalance_megatron.attention.context_parallel.hierarchical_ring import (
    HierarchicalRingExchange,
)
from sparsebalance_megatron.attention.context_parallel.ring import RingExchange
from sparsebalance_megatron.config import ExchangeName
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan, PlanError


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextGroup:
    """The ranks that share one row, of which this is ``member`` of ``members``.

    ``exchange`` is how their keys and values travel, None where this rank has all of the row.
    ``alone`` is a group of this rank by itself.
    """

    process_group: ProcessGroup
    member: int
    members: int
    exchange: Exchange | None
    alone: ProcessGroup


@dataclass(frozen=True, kw_only=True, eq=False)
class ContextGroups:
    """Every group that this rank is in.

    ``rank`` counts data-parallel and context-parallel ranks together, as plans do. ``agreement``
    holds all ranks that may share a row with this one, over a backend of the host.
    """

    rank: int
    by_width: Mapping[int, ContextGroup]
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
        return self.by_width[slot.width]


def make_context_groups(
    widest: int, *, exchange: ExchangeName, ranks_per_node: int, timeout_minutes: float
) -> ContextGroups:
    """Make the groups; collective over all ranks, once Megatron's own exist.

    Args:
        widest: ranks of the widest row, a power of two that divides the data-parallel times
            context-parallel size.
        exchange: how keys and values travel.
        ranks_per_node: of those that may share a row; the inner rings of a hierarchical one.
        timeout_minutes: after which a rank that waits in vain for another member fails.
    """
    maker = _Maker(timedelta(minutes=timeout_minutes))
    groups = {1 << power: maker.neighbours(1 << power) for power in range(widest.bit_length())}
    inner = max(width for width in groups if width <= ranks_per_node)
    made: dict[int, ContextGroup] = {}
    for width, group in groups.items():
        if width == 1:
            travel: Exchange | None = None
        elif exchange == "all-gather":
            travel = AllGatherExchange(group)
        elif exchange == "ring" or width <= inner:
            travel = RingExchange(group)
        else:
            travel = HierarchicalRingExchange(
                inner=groups[inner], outer=maker.neighbours(width, every=inner)
            )
        made[width] = ContextGroup(
            process_group=group,
            member=torch.distributed.get_rank(group),
            members=width,
            exchange=travel,
            alone=groups[1],
        )
    return ContextGroups(
        rank=maker.rank, by_width=made, agreement=maker.neighbours(widest, backend="gloo")
    )


class _Maker:
    """Makes groups of ranks that are neighbours in data-parallel and context-parallel place."""

    def __init__(self, timeout: timedelta) -> None:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        own: Sequence[int] = torch.distributed.get_process_group_ranks(group)
        rows: list[Sequence[int]] = [()] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(rows, own)
        self._rows = sorted(set(map(tuple, rows)))
        self._timeout = timeout
        self.rank = own.index(torch.distributed.get_rank())

    def neighbours(self, width: int, *, every: int = 1, backend: str | None = None) -> ProcessGroup:
        """The group that this rank is in, of all that ``width`` neighbours make.

        Args:
            every: one group of each of so many neighbours, not one of all.
        """
        wanted: ProcessGroup | None = None
        for row in self._rows:
            for first in range(0, len(row), width):
                for offset in range(every):
                    members = list(row[first + offset : first + width : every])
                    group: Any = torch.distributed.new_group(
                        members, timeout=self._timeout, backend=backend
                    )
                    if torch.distributed.get_rank() in members:
                        wanted = group
        if wanted is None:
            raise PlanError(f"rank {self.rank} is in no group of {width} data-parallel ranks")
        return wanted
