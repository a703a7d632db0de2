# SPDX-License-Identifier: Apache-2.0
"""The state of a search: where every sample is, and how many ranks share each micro-batch.

Shape legend: X contents or columns, F forward, then backward of every column, I levels of
cp_size or pairs of groups.
"""

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.step_costs import StepCosts, joined

SEQUENCES, TOKENS, BLOCKS = -3, -2, -1
"""Places among contents."""


class Contents:
    """Sums over the samples of a micro-batch, and its times by cp_size.

    Times are of the columns of StepCosts, those that are alike together.

    Args:
        work_2SX: ms of every sample in those columns, on a rank by itself.
        shared: whether ranks may share micro-batches.

    Attributes:
        of_sample_SX: contents of every sample.
    """

    def __init__(self, costs: StepCosts, work_2SX: np.ndarray, *, shared: bool = True) -> None:
        samples, own = len(costs.lengths_tokens_S), costs.own
        work_XI = work_2SX[..., :own].reshape(2 * samples, own).T
        chunk_of_X = costs.chunk_of_X.tolist()
        keys = [(chunk_of_X[column], *work_I.tolist()) for column, work_I in enumerate(work_XI)]
        number_of = {key: number for number, key in enumerate(sorted(set(keys)))}
        chunk_of_own = [key[0] for key in number_of]
        self._chunk_of_X = np.concatenate([chunk_of_own, costs.chunk_of_X[own:]]).astype(np.int64)
        alike_X = np.array(list(map(number_of.__getitem__, keys)), dtype=np.int64)
        column_X = np.append(alike_X, len(number_of) + np.arange(costs.chunks))
        in_column = column_X == np.arange(len(self._chunk_of_X))[:, None]
        work, dense, slower, exchange, sequence, constant = (
            np.stack([values[..., some].sum(axis=-1) for some in in_column], axis=-1)
            for values in (
                *(work_2SX, costs.dense_tokens_SX, costs.slower_dense_2SX),
                *(costs.exchange_2X, costs.sequence_2X, costs.constant_2X),
            )
        )
        terms = [(work - sequence[:, None]).transpose(1, 0, 2).reshape(samples, -1)]
        self._work_terms = times = terms[0].shape[1]
        self._of_dense = []
        """Terms of dense documents that ranks share, and what they weigh by cp_size."""
        for by_sample_SF, weight_2W in (
            (np.tile(dense, (1, 2)), costs.heads_more_2W),
            (np.concatenate(slower, axis=1), np.tile(costs.gathering_share_W, (2, 1))),
        ):
            if shared and weight_2W.any():
                some = slice(times * len(terms), times * (len(terms) + 1))
                self._of_dense.append((some, np.repeat(weight_2W.T, times // 2, axis=1)))
                terms.append(by_sample_SF)
        counts_3S = [np.ones(samples), costs.lengths_tokens_S, costs.blocks_S]
        self.of_sample_SX = np.concatenate([*terms, np.stack(counts_3S, axis=1)], axis=1)
        self._constant, self._sequence = constant.reshape(-1), sequence.reshape(-1)
        self._share_W = costs.share_W
        received_WF = np.repeat(costs.received_2W.T, sequence.shape[1], axis=1)
        self._exchange_WF = received_WF * exchange.reshape(-1)
        self._costs = costs

    def ms(self, contents: np.ndarray, cp_size: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Forward, then backward ms of every column, [..., F], on each rank of micro-batches.

        Args:
            contents: of the micro-batches, [..., X].
            cp_size: of the micro-batches, [...].
            rank: on which the micro-batches begin, [...].
        """
        share = self._share_W[cp_size][..., None]
        ms = contents[..., : self._work_terms] * share
        if cp_size.max(initial=1) > 1:
            ms += contents[..., TOKENS, None] * self._exchange_WF[cp_size]
            for some, weight_WF in self._of_dense:
                ms += contents[..., some] * weight_WF[cp_size]
        ms += contents[..., SEQUENCES, None] * self._sequence
        ms += self._constant
        if self._costs.has_slow_devices:
            ms *= np.tile(self._costs.slowness(cp_size, rank, self._chunk_of_X), 2)
        return np.asarray(ms)

    def joined(self, ms_IEWMF: np.ndarray) -> np.ndarray:
        """Ms of lockstep groups, forward, then backward of every chunk, from those of members."""
        ms_IEWM2X = ms_IEWMF.reshape(*ms_IEWMF.shape[:-1], 2, -1)
        ms_IEM2C = joined(np.moveaxis(ms_IEWM2X, 2, -2), self._chunk_of_X)
        return ms_IEM2C.reshape(*ms_IEM2C.shape[:3], -1)


class State:
    """A placement as arrays.

    Attributes:
        place_S: the place ``rank * M + position`` where each sample's micro-batch begins.
        cp_size_J: ranks of the micro-batch that each place takes part in.
        has_JX: contents of the micro-batch that begins at each place; zeros where none begins.
        ms_JF: times of the micro-batch that each place takes part in.
    """

    def __init__(self, start: Arrangement, contents: Contents) -> None:
        self.ranks, self.positions = start.cp_sizes_RM.shape
        self.contents = contents
        self.place_S = start.micro_batch_of_S.copy()
        self.cp_size_J = start.cp_sizes_RM.reshape(-1).copy()
        self.has_JX = np.zeros((len(self.cp_size_J), contents.of_sample_SX.shape[1]))
        np.add.at(self.has_JX, self.place_S, contents.of_sample_SX)
        first_J = start.groups.first_J
        rank_J = first_J // self.positions
        self.ms_JF = contents.ms(self.has_JX[first_J], self.cp_size_J, rank_J)

    @property
    def size_J(self) -> np.ndarray:
        """Samples of the micro-batch that begins at each place."""
        return self.has_JX[:, SEQUENCES].astype(np.int64)

    @property
    def ms_RMF(self) -> np.ndarray:
        return self.ms_JF.reshape(self.ranks, self.positions, -1)

    @property
    def cp_sizes_RM(self) -> np.ndarray:
        return self.cp_size_J.reshape(self.ranks, self.positions)

    def put(self, place: int, cp_size: int, has_X: np.ndarray, ms_F: np.ndarray) -> None:
        """Begin a micro-batch at a place, instead of what its ranks took part in there."""
        reached = place + self.positions * np.arange(cp_size)
        self.cp_size_J[reached], self.has_JX[reached], self.ms_JF[reached] = cp_size, 0.0, ms_F
        self.has_JX[place] = has_X

    def exchange_positions(self, ranks: slice, one: int, other: int) -> None:
        """Let neighbouring ranks run what they have at two positions in each other's place."""
        for values_J in (self.cp_size_J, self.has_JX, self.ms_JF):
            values_RM = values_J.reshape(self.ranks, self.positions, *values_J.shape[1:])
            values_RM[ranks, [one, other]] = values_RM[ranks, [other, one]]
        rank_S, position_S = np.divmod(self.place_S, self.positions)
        moves_S = (rank_S >= ranks.start) & (rank_S < ranks.stop)
        at_one_S, at_other_S = (moves_S & (position_S == place) for place in (one, other))
        self.place_S[at_one_S] += other - one
        self.place_S[at_other_S] += one - other


class Numbers:
    """A counter, mixed (splitmix64): the same numbers everywhere."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, count: int) -> np.ndarray:
        """So many, uint64."""
        mixed = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))
