# SPDX-License-Identifier: Apache-2.0
"""The state of a search: where every sample is, and how many ranks share each micro-batch.

Shape legend: S samples, R data-parallel ranks, M micro-batches, J = R x M places (rank and
position), X contents, F forward, then backward of every chunk.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.search.contents import SEQUENCES, Contents


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
        first_J = first_places(start.cp_sizes_RM)
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
