# SPDX-License-Identifier: Apache-2.0
"""Who shares a micro-batch, and who waits for whom.

::

              position 0   position 1
    rank 0    a            c            Ranks 0 and 1 share a, whose cp_size is 2.
    rank 1    a            d            Rank 0 runs c alone.
    rank 2    b            e            With lockstep_ranks 2, ranks 2 and 3 begin every layer
    rank 3    b            f            together, and are one rank of what is simulated.

Neighbours share, as many as a power of two, beginning at a multiple of it. So the cp_size of the
micro-batch that every rank takes part in says which ranks share it. A rank alone is a group of one.

Shape legend: I items.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from sparsebalance_megatron.errors import PlanError


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


@dataclass(frozen=True, eq=False)
class Groups:
    """Ranks that share micro-batches.

    ``cp_sizes_RM``: ranks of the micro-batch that each takes part in.
    """

    cp_sizes_RM: np.ndarray

    @cached_property
    def first_J(self) -> np.ndarray:
        """The place ``rank * M + position`` on a micro-batch's first rank, for every place in the
        micro-batch."""
        ranks, positions = self.cp_sizes_RM.shape
        rank_R1 = np.arange(ranks)[:, None]
        first_RM = rank_R1 - rank_R1 % self.cp_sizes_RM
        return np.asarray(first_RM * positions + np.arange(positions)).reshape(-1)

    @property
    def meeting(self) -> list[range]:
        """The ranks that meet in micro-batches that they share, directly or through others: those
        of the largest one that a rank takes part in."""
        largest_R = self.cp_sizes_RM.max(axis=1).tolist()
        firsts = [rank for rank, largest in enumerate(largest_R) if rank % largest == 0]
        return [range(first, first + largest_R[first]) for first in firsts]

    def most_RM(self, values_RM: np.ndarray) -> np.ndarray:
        """The largest value at each position among the ranks that a rank meets."""
        firsts = [group.start for group in self.meeting]
        most_EM = np.maximum.reduceat(values_RM, firsts)
        return np.repeat(most_EM, np.diff(firsts, append=len(values_RM)), axis=0)

    def of_lockstep(self, lockstep_ranks: int) -> "Groups":
        """Lockstep groups that share micro-batches, as ranks.

        A micro-batch that no more ranks share than a lockstep group has lies in one. One that more
        share is shared by whole lockstep groups.

        Raises:
            PlanError: ranks do not divide into groups, or a micro-batch is shared by ranks of
                several groups and not by all of theirs.
        """
        size, ranks = lockstep_ranks, len(self.cp_sizes_RM)
        larger, smaller = np.maximum(self.cp_sizes_RM, size), np.minimum(self.cp_sizes_RM, size)
        if ranks % size or (larger % smaller).any():
            raise PlanError(
                f"lockstep groups of {size} ranks: must divide the {ranks} ranks, and every "
                f"cp_size (at most {self.cp_sizes_RM.max()}) must divide {size} or be a multiple "
                "of it"
            )
        return Groups(larger[::size] // size)


class Members:
    """Groups of ranks that share each item.

    Args:
        cp_sizes_IR: of the micro-batch that each rank takes part in.

    Attributes:
        share: whether any ranks do.
    """

    def __init__(self, cp_sizes_IR: np.ndarray) -> None:
        largest = int(cp_sizes_IR.max(initial=1))
        self.share = largest > 1
        self._apart = []
        """For groups of 2, 4, ... neighbours: 0 where they all share, -inf where they do not."""
        self._levels = np.zeros(len(cp_sizes_IR), dtype=np.int64)
        """The largest such groups that share an item, by their number in the list."""
        size = 2
        while size <= largest:
            together_IE = cp_sizes_IR[:, ::size] >= size
            self._apart.append(np.where(together_IE, 0.0, -np.inf))
            self._levels[together_IE.any(axis=1)] = len(self._apart)
            size *= 2

    def maximum(self, values_IR: np.ndarray, items: slice = slice(None)) -> None:
        """In place, the largest value among the members of a micro-batch, for each of them.

        Args:
            items: of the first axis of the cp_sizes, those that the values are for.
        """
        largest = values_IR
        for level, apart in enumerate(self._apart[: self._levels[items].max()]):
            largest = np.maximum(largest[:, ::2], largest[:, 1::2])
            shared = largest + apart[items]
            # Member by member, as numpy is slow along short axes.
            for member in range(2 << level):
                of_member = values_IR[:, member :: 2 << level]
                np.maximum(of_member, shared, out=of_member)
