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

Shape legend: I items, X ranks, E lockstep groups.
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
    """Groups of ranks that share each item, for arrays whose last axis is ranks.

    Ranks that may share are far apart there, so that what is done to one of them is done to long
    rows of numbers: see :attr:`order`.

    Args:
        cp_sizes_IX: of the micro-batch that each rank takes part in.

    Attributes:
        share: whether any ranks do.
    """

    def __init__(self, cp_sizes_IX: np.ndarray) -> None:
        self._together = int(cp_sizes_IX.max(initial=1))
        self.share = self._together > 1
        self._groups = cp_sizes_IX.shape[1] // self._together
        self._apart = []
        """For groups of 2, 4, ... neighbours: 0 where they all share, -inf where they do not."""
        self._levels = np.zeros(len(cp_sizes_IX), dtype=np.int64)
        """The largest such groups that share an item, by their number in the list."""
        if not self.share:
            return
        by_rank = cp_sizes_IX[:, self.order].reshape(len(cp_sizes_IX), self._together, -1)
        size = 2
        while size <= self._together:
            together = by_rank[:, ::size] >= size
            self._apart.append(np.where(together, 0.0, -np.inf))
            self._levels[together.any(axis=(1, 2))] = len(self._apart)
            size *= 2

    @property
    def order(self) -> np.ndarray:
        """Ranks by their number within the widest micro-batch, then by rank group: how arrays hold
        them."""
        return np.arange(self._groups * self._together).reshape(-1, self._together).T.reshape(-1)

    def in_order(self, values_R: np.ndarray) -> np.ndarray:
        """Values [..., R] in :attr:`order`; themselves where no ranks share."""
        return values_R[..., self.order] if self.share else values_R

    def back_in_order(self, values_X: np.ndarray) -> np.ndarray:
        """Values [..., X] in the order of ranks; themselves where no ranks share."""
        return values_X[..., np.argsort(self.order)] if self.share else values_X

    def maximum(self, values_IX: np.ndarray, items: slice = slice(None)) -> None:
        """In place, the largest value among the members of a micro-batch, for each of them.

        Args:
            values_IX: contiguous, with the ranks in :attr:`order`.
            items: of the first axis of the cp_sizes, those that ``values_IX`` is for.
        """
        by_rank = values_IX.reshape(len(values_IX), self._together, self._groups)
        largest = by_rank
        for level, apart in enumerate(self._apart[: self._levels[items].max()]):
            largest = np.maximum(largest[:, ::2], largest[:, 1::2])
            shared = by_rank.reshape(len(by_rank), -1, 2 << level, self._groups)
            np.maximum(shared, (largest + apart[items])[:, :, None], out=shared)
