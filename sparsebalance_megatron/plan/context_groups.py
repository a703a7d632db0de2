# SPDX-License-Identifier: Apache-2.0
"""Micro-batches that several ranks share: neighbours, as many as a power of two, at one position.

A micro-batch of cp_size w begins at a multiple of w, so the cp_size of the micro-batch that every
rank takes part in says which ranks share it.

Shape legend: I items, X ranks, E groups of ranks that meet, or lockstep groups.
"""

import numpy as np

from sparsebalance_megatron.errors import PlanError


def is_power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def first_places(cp_sizes_RM: np.ndarray) -> np.ndarray:
    """The place ``r * M + m`` on a micro-batch's first rank, for every place in the micro-batch,
    [J]."""
    ranks, positions = cp_sizes_RM.shape
    rank_R1 = np.arange(ranks)[:, None]
    first_RM = rank_R1 - rank_R1 % cp_sizes_RM
    return np.asarray(first_RM * positions + np.arange(positions)).reshape(-1)


def unshared(ranks: int, positions: int) -> np.ndarray:
    """[R, M] context-parallel sizes where every rank runs its micro-batches alone."""
    return np.ones((ranks, positions), dtype=np.int64)


def cp_sizes_of_groups(cp_sizes_RM: np.ndarray, lockstep_ranks: int) -> np.ndarray:
    """[E, M] lockstep groups of the micro-batch that each group takes part in.

    A micro-batch that no more ranks share than a group has lies in one group. One that more share
    is shared by whole groups.

    Raises:
        PlanError: ranks do not divide into groups, or a micro-batch is shared by ranks of several
            groups and not by all of theirs.
    """
    size, ranks = lockstep_ranks, len(cp_sizes_RM)
    larger, smaller = np.maximum(cp_sizes_RM, size), np.minimum(cp_sizes_RM, size)
    if ranks % size or (larger % smaller).any():
        raise PlanError(
            f"lockstep groups of {size} ranks: must divide the {ranks} ranks, and every cp_size "
            f"(at most {cp_sizes_RM.max()}) must divide {size} or be a multiple of it"
        )
    return larger[::size] // size


def meeting_groups(cp_sizes_RM: np.ndarray) -> list[range]:
    """The ranks that meet in micro-batches that they share, directly or through others.

    As micro-batches begin at multiples of their size, these are the ranks of the largest one that a
    rank takes part in.
    """
    largest_R = cp_sizes_RM.max(axis=1).tolist()
    firsts = [rank for rank, largest in enumerate(largest_R) if rank % largest == 0]
    return [range(first, first + largest_R[first]) for first in firsts]


def most_segments(cp_sizes_RM: np.ndarray, segments_RM: np.ndarray) -> np.ndarray:
    """The most segments at each position among the ranks that a rank meets, [R, M]."""
    if segments_RM.max() == 1 or cp_sizes_RM.max() == 1:
        return segments_RM
    groups = meeting_groups(cp_sizes_RM)
    most_EM = np.stack([segments_RM[group].max(axis=0) for group in groups])
    return np.repeat(most_EM, list(map(len, groups)), axis=0)


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
