# SPDX-License-Identifier: Apache-2.0
"""How others would place a step's samples, for dense attention that is Megatron's own.

*Dynamic context parallelism*, after Megatron's packing-aware scheduler (read 2026-11): one position
after the other is filled, from the longest sample left to the shortest.

1. The longest gets the least power of two of ranks under the tokens that a rank may hold.
2. Every other sample joins a group of ranks that has room for it, or takes a power of two of the
   ranks left, wherever the largest sum of tokens squared per rank stays least: at most 1.05 times
   the longest sample's tokens times those that a rank may hold. Else it waits for the next one.
3. While ranks are left, the smallest group doubles. Where it cannot, all ranks share one group of
   the longest samples that fit.

*Sorted batches*: samples are divided by Karmarkar and Karp's largest differencing, by tokens
squared, into equally many for every rank, and a rank's into its micro-batches, which run from the
heaviest to the lightest.
"""

import heapq
from collections.abc import Sequence
from itertools import batched
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.job import Job

_SLACK = 1.05


class _Group(NamedTuple):
    """Ranks that share samples: their tokens, and the sum of tokens squared."""

    ranks: int
    samples: tuple[int, ...] = ()
    tokens: int = 0
    squared: float = 0.0

    def joined(self, sample: int, tokens: int) -> "_Group":
        sums = self.tokens + tokens, self.squared + tokens**2
        return _Group(self.ranks, (*self.samples, sample), *sums)

    @property
    def work(self) -> float:
        return self.squared / self.ranks


def dynamic_context_parallel(
    lengths_tokens: Sequence[int], job: Job, rank_tokens: int
) -> Arrangement:
    """Samples on groups of ranks, the largest groups first; ``rank_tokens``: that a rank may hold.

    Raises:
        PlanError: a sample does not fit all ranks.
    """
    ranks = job.data_parallel_size
    if max(lengths_tokens) > ranks * rank_tokens:
        raise PlanError(
            f"dynamic context parallelism: {max(lengths_tokens)} tokens exceed {ranks} ranks of "
            f"{rank_tokens}"
        )
    sizes = [*(1 << power for power in range((ranks - 1).bit_length())), ranks]
    waiting = sorted(range(len(lengths_tokens)), key=lambda sample: -lengths_tokens[sample])
    positions: list[list[_Group]] = []
    while waiting:
        groups, waiting = _position(waiting, lengths_tokens, sizes, rank_tokens)
        positions.append(sorted(groups, key=lambda group: -group.ranks))
    samples: list[list[tuple[int, ...]]] = [[() for _ in positions] for _ in range(ranks)]
    cp_sizes_RM = np.empty((ranks, len(positions)), dtype=np.int64)
    for position, groups in enumerate(positions):
        first = 0
        for group in groups:
            samples[first][position] = group.samples
            cp_sizes_RM[first : first + group.ranks, position] = group.ranks
            first += group.ranks
    return Arrangement(samples=tuple(map(tuple, samples)), cp_sizes_RM=cp_sizes_RM)


def _position(
    waiting: Sequence[int],
    lengths_tokens: Sequence[int],
    sizes: Sequence[int],
    rank_tokens: int,
) -> tuple[list[_Group], list[int]]:
    """The groups of a position, of one of these sizes, and the samples that wait for others."""
    ranks = sizes[-1]
    limit = _SLACK * lengths_tokens[waiting[0]] * rank_tokens
    groups: list[_Group] = []
    left: list[int] = []
    for sample in waiting:
        tokens, free = lengths_tokens[sample], ranks - sum(group.ranks for group in groups)
        least = next(size for size in sizes if tokens <= size * rank_tokens)
        peak = max((group.work for group in groups), default=0.0)
        places = [
            (number, group)
            for number, group in enumerate(groups)
            if group.ranks >= least and group.tokens + tokens <= rank_tokens * group.ranks
        ]
        places += [(len(groups), _Group(size)) for size in sizes if least <= size <= free]
        if not groups:
            places = places[:1]
        choices = [
            (max(peak, joined.work), joined.ranks, number, joined)
            for number, group in places
            for joined in (group.joined(sample, tokens),)
            if not groups or joined.work <= limit
        ]
        if choices:
            _, _, number, joined = min(choices, key=lambda choice: choice[:3])
            groups[number : number + 1] = [joined]
        else:
            left.append(sample)
    while (free := ranks - sum(group.ranks for group in groups)) > 0:
        number = min(range(len(groups)), key=lambda each: groups[each].ranks)
        smallest = groups[number]
        if smallest.ranks > free:
            return _position(waiting, lengths_tokens, [ranks], rank_tokens)
        groups[number] = smallest._replace(ranks=2 * smallest.ranks)
    return groups, left


def sorted_batches(lengths_tokens: Sequence[int], job: Job, rank_tokens: int) -> Placement:
    """Samples on the context-parallel groups of a job, whatever their tokens.

    Raises:
        PlanError: they do not divide over its micro-batches.
    """
    groups = job.groups
    if len(lengths_tokens) % groups.places:
        raise PlanError(
            f"sorted batches: {len(lengths_tokens)} samples do not divide over {groups.places} "
            "micro-batches"
        )
    squared_S = [float(tokens) ** 2 for tokens in lengths_tokens]
    placement = []
    for of_rank in _divided(range(len(lengths_tokens)), squared_S, groups.data_parallel_size):
        held = _divided(of_rank, squared_S, groups.micro_batches)
        held.sort(key=lambda samples: -sum(squared_S[sample] for sample in samples))
        placement.append(tuple(tuple(sorted(samples)) for samples in held))
    return tuple(placement)


def _divided(samples: Sequence[int], work_S: Sequence[float], parts: int) -> list[tuple[int, ...]]:
    """Equally many samples in each part, of nearly equal work: what differs most is joined, the
    heaviest part of one with the lightest of the other."""
    heap: list[tuple[float, int, list[tuple[float, tuple[int, ...]]]]] = []

    def push(number: int, sets: list[tuple[float, tuple[int, ...]]]) -> None:
        sets.sort(reverse=True)
        heapq.heappush(heap, (sets[-1][0] - sets[0][0], number, sets))

    heaviest_first = sorted(samples, key=lambda sample: -work_S[sample])
    for number, some in enumerate(batched(heaviest_first, parts)):
        push(number, [(work_S[sample], (sample,)) for sample in some])
    while len(heap) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        pairs = zip(one, reversed(other), strict=True)
        push(number, [(a + b, (*of_a, *of_b)) for (a, of_a), (b, of_b) in pairs])
    return [held for _, held in heap[0][2]]
