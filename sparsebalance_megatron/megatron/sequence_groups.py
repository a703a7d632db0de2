# SPDX-License-Identifier: Apache-2.0
"""This rank's place among Megatron's, and the groups of ranks that share a packed sequence; asked
once Megatron's process groups exist.

A sequence lies on 1, 2, 4, ... neighbouring ranks of those that differ in their data-parallel and
context-parallel place alone. Neighbours of so many begin at a multiple of their number, so that
every rank is in one group of each size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from megatron.core import parallel_state
from torch.distributed import ProcessGroup

from sparsebalance_megatron.attention.sequence.between_ranks import AllGatherExchange
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup
from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.learn.measurement import RankPlace
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan


def rank_place() -> RankPlace:
    """Place of this rank; data-parallel and context-parallel ranks count together."""
    return RankPlace(
        data_parallel_rank=parallel_state.get_data_parallel_rank(with_context_parallel=True),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        tensor_parallel_rank=parallel_state.get_tensor_model_parallel_rank(),
        world_rank=torch.distributed.get_rank(),
        world_size=torch.distributed.get_world_size(),
    )


def check_lockstep_ranks(lockstep_ranks: int) -> bool:
    """Refuse an expert group of this rank that is not within so many neighbouring ranks; whether it
    is all of them, so that they wait for one another in expert layers alone."""
    ranks_of = torch.distributed.get_process_group_ranks
    experts = set(ranks_of(parallel_state.get_expert_tensor_and_model_parallel_group()))
    replica = ranks_of(parallel_state.get_data_parallel_group(with_context_parallel=True))
    places = [place for place, rank in enumerate(replica) if rank in experts]
    if len({place // lockstep_ranks for place in places}) > 1:
        raise ConfigError(
            f"the expert group of data-parallel ranks {places} is no part of {lockstep_ranks} "
            "neighbouring ones, which plans take for it; use Megatron's default order of ranks, or "
            "give begin_host_run lockstep_ranks that hold the group"
        )
    return len(places) == lockstep_ranks


def data_parallel_group() -> ProcessGroup:
    """The ranks that train the same layers on other samples; context-parallel ranks left out."""
    return parallel_state.get_data_parallel_group()


@dataclass(frozen=True, kw_only=True, eq=False)
class SequenceGroups:
    """Every group that this rank is in; ``rank`` counts data- and context-parallel ranks together.

    ``agreement`` holds all ranks that may share a sequence with this one, over a backend of the
    host.
    """

    rank: int
    by_size: Mapping[int, SequenceGroup]
    agreement: ProcessGroup

    def sharing(self, micro_batch: MicroBatchPlan) -> SequenceGroup:
        """The group of ranks that share a micro-batch of this rank."""
        size = micro_batch.cp_size
        if size not in self.by_size or micro_batch.rank % size:
            raise PlanError(
                f"micro-batch {micro_batch.position} lies on ranks {micro_batch.rank} to "
                f"{micro_batch.rank + size - 1}: groups of 1, 2, ... {max(self.by_size)} ranks "
                "begin at a multiple of their size"
            )
        return self.by_size[size]


def make_sequence_groups(
    largest: int,
    *,
    heads: Exchange | None = None,
    timeout_minutes: float = 10.0,
) -> SequenceGroups | None:
    """Make the groups; collective over all ranks, once. None where no two ranks share a sequence.

    ``largest``: ranks of the largest group, a power of two that divides the data-parallel times
    context-parallel size. ``heads``: says between how many ranks heads travel; None for none. A
    rank that waits in vain for another member fails after ``timeout_minutes``.
    """
    if largest == 1:
        return None
    timeout = timedelta(minutes=timeout_minutes)
    own = torch.distributed.get_process_group_ranks(
        parallel_state.get_data_parallel_group(with_context_parallel=True)
    )
    places: list[Sequence[int]] = [()] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(places, own)
    replicas = sorted(set(map(tuple, places)))
    sizes = [1 << power for power in range(largest.bit_length())]
    groups = {size: _neighbours(replicas, size, timeout) for size in sizes}
    made = {
        size: SequenceGroup(
            member=torch.distributed.get_rank(group),
            members=size,
            exchange=AllGatherExchange(group) if size > 1 else None,
            process_group=group,
            alone=groups[1],
            shares_heads=heads is not None and heads.heads_obstacle(size) is None,
            lists_by_heads=heads is not None and heads.lists_by_heads(size),
        )
        for size, group in groups.items()
    }
    return SequenceGroups(
        rank=own.index(torch.distributed.get_rank()),
        by_size=made,
        agreement=_neighbours(replicas, largest, timeout, backend="gloo"),
    )


def _neighbours(
    replicas: Sequence[Sequence[int]], size: int, timeout: timedelta, *, backend: str | None = None
) -> ProcessGroup:
    """This rank's group of ``size`` neighbours in data-parallel and context-parallel place."""
    wanted: ProcessGroup | None = None
    for replica in replicas:
        for first in range(0, len(replica), size):
            members = list(replica[first : first + size])
            group: Any = torch.distributed.new_group(members, timeout=timeout, backend=backend)
            if torch.distributed.get_rank() in members:
                wanted = group
    assert wanted is not None, "every rank has a data-parallel place"
    return wanted
