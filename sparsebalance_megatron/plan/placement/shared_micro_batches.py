# SPDX-License-Identifier: Apache-2.0
"""Contents and times of micro-batches of any cp_size, for a search that changes them one by one.

What a micro-batch takes at a cp_size is linear in its contents, so moves add and subtract contents.

Shape legend: S samples, R data-parallel ranks, P pipeline stages, V virtual stages,
M micro-batches, C = P x V chunks, F = 4 C + 3 contents: work and exchange of every chunk and
direction, then sequences, tokens and blocks; J micro-batches looked at, I their samples.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.step_costs import StepCosts

SEQUENCES, TOKENS, BLOCKS = -3, -2, -1
"""Places among contents."""


class Contents:
    """Sums over the samples of a micro-batch, and its times by cp_size.

    Attributes:
        of_sample_SF: contents of every sample.
    """

    def __init__(self, costs: StepCosts, sample_2SC: np.ndarray) -> None:
        samples = len(costs.lengths_tokens_S)
        work_2SC = sample_2SC - costs.sequence_2C[:, None]
        counts_3S = [np.ones(samples), costs.lengths_tokens_S, costs.blocks_S]
        terms = [
            values.transpose(1, 0, 2).reshape(samples, -1)
            for values in (work_2SC, costs.exchange_2SC)
        ]
        self.of_sample_SF = np.concatenate([*terms, np.stack(counts_3S, axis=1)], axis=1)
        self._terms = 2 * costs.chunks
        self._constant = costs.constant_2C.reshape(-1)
        self._sequence = costs.sequence_2C.reshape(-1)
        self._share_W = costs.share_W
        self._received_W = costs.received_W
        self._slowness_WRC = _slowness_of_micro_batches(costs)

    def of(self, samples: list[int]) -> np.ndarray:
        """[F] of some samples together."""
        return np.asarray(self.of_sample_SF[samples].sum(axis=0))

    def ms(self, contents: np.ndarray, cp_size: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Forward then backward ms of every chunk, [..., 2 C], on each rank of micro-batches.

        Args:
            contents: of the micro-batches, [..., F].
            cp_size: of the micro-batches, [...].
            rank: on which the micro-batches begin, [...].
        """
        work, exchange = contents[..., : self._terms], contents[..., self._terms : SEQUENCES]
        ms = work * self._share_W[cp_size][..., None]
        ms += exchange * self._received_W[cp_size][..., None]
        ms += contents[..., SEQUENCES, None] * self._sequence
        ms += self._constant
        if self._slowness_WRC is not None:
            ms *= self._slowness_WRC[np.frexp(np.maximum(cp_size, 1))[1] - 1, rank]
        return np.asarray(ms)


def _slowness_of_micro_batches(costs: StepCosts) -> np.ndarray | None:
    """Slowness of the slowest of 1, 2, 4, ... ranks from every rank on; None if all are alike."""
    if bool((costs.slowness_RP == 1.0).all()):
        return None
    slowness_RC = np.repeat(costs.slowness_RP, costs.job.virtual_stages, axis=1)
    slowness_RC = np.concatenate([slowness_RC, slowness_RC], axis=1)
    levels, cp_size = [slowness_RC], 1
    while len(slowness_RC) % (2 * cp_size) == 0:
        cp_size *= 2
        of_micro_batches = slowness_RC.reshape(-1, cp_size, slowness_RC.shape[1]).max(axis=1)
        levels.append(np.repeat(of_micro_batches, cp_size, axis=0))
    return np.stack(levels)


class SharedMicroBatches:
    """A placement that is changed micro-batch by micro-batch.

    Attributes:
        cp_sizes_RM: of the micro-batch that every rank takes part in.
        members: samples of the micro-batch that begins at (rank, position).
    """

    def __init__(self, start: Arrangement) -> None:
        shape = len(start.samples), len(start.samples[0])
        self.cp_sizes_RM = start.cp_sizes_RM.copy()
        self.members = {
            (rank, position): start.samples[rank][position]
            for rank, position in itertools.product(*map(range, shape))
            if start.samples[rank][position]
        }

    def copy(self) -> SharedMicroBatches:
        """Another that does not follow changes of this one."""
        twin = copy.copy(self)
        twin.cp_sizes_RM, twin.members = self.cp_sizes_RM.copy(), dict(self.members)
        return twin

    def put(self, rank: int, position: int, cp_size: int, samples: tuple[int, ...]) -> None:
        """Begin a micro-batch where none begins."""
        self.cp_sizes_RM[rank : rank + cp_size, position] = cp_size
        self.members[rank, position] = samples

    def swap_positions(self, ranks: range, one: int, other: int) -> None:
        """Exchange all micro-batches of an island at two positions."""
        part = slice(ranks.start, ranks.stop)
        self.cp_sizes_RM[part, [one, other]] = self.cp_sizes_RM[part, [other, one]]
        for rank in ranks:
            held = [self.members.pop((rank, position), None) for position in (one, other)]
            for position, samples in zip((other, one), held, strict=True):
                if samples is not None:
                    self.members[rank, position] = samples

    def arranged(self) -> Arrangement:
        """The placement as it stands."""
        ranks, positions = self.cp_sizes_RM.shape
        return Arrangement(
            samples=tuple(
                tuple(tuple(sorted(self.members.get((r, m), ()))) for m in range(positions))
                for r in range(ranks)
            ),
            cp_sizes_RM=self.cp_sizes_RM.copy(),
        )


class MicroBatchTable:
    """The micro-batches of some islands as arrays.

    Attributes:
        rank_J, position_J, cp_size_J: where each begins and how wide it is.
        size_J: its number of samples; those are ``sample_I[first_J : first_J + size_J]``.
        buddy_J: the micro-batch that it would merge with; -1 where there is none.
        contents_JF: what it holds.
    """

    def __init__(self, state: SharedMicroBatches, islands: list[range], contents: Contents) -> None:
        positions = range(state.cp_sizes_RM.shape[1])
        places = [
            (rank, position)
            for ranks in islands
            for rank in ranks
            for position in positions
            if (rank, position) in state.members
        ]
        number = {place: micro_batch for micro_batch, place in enumerate(places)}
        self.members = [state.members[place] for place in places]
        self.rank_J, self.position_J = np.array(places).T
        self.cp_size_J = state.cp_sizes_RM[self.rank_J, self.position_J]
        self.size_J = np.array([len(samples) for samples in self.members])
        self.first_J = np.cumsum(self.size_J) - self.size_J
        self.sample_I = np.fromiter(
            itertools.chain.from_iterable(self.members), np.int64, int(self.size_J.sum())
        )
        buddy_rank = (self.rank_J ^ self.cp_size_J).tolist()
        self.buddy_J = np.array(
            [
                number.get(place, -1)
                for place in zip(buddy_rank, self.position_J.tolist(), strict=True)
            ]
        )
        self.buddy_J[self.cp_size_J[self.buddy_J] != self.cp_size_J] = -1
        self.contents_JF = np.add.reduceat(
            contents.of_sample_SF[self.sample_I], self.first_J, axis=0
        )
