# SPDX-License-Identifier: Apache-2.0
"""Costs of samples layer by layer, for ranks that wait for one another in every layer.

Shape legend: S samples of a global batch, L layers, P pipeline stages, V virtual stages,
C = P x V chunks, F features, X = L + 2 C columns; a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Ms of every sample in every layer, whatever its budgets, and outside layers.

    Attributes:
        chunk_of_layer_L: the chunk of each layer.
        fixed_2SL: ms of a sample in each layer at budgets of 0 blocks.
        sequence_2L: of it, what a sequence costs whatever its length.
        pair_2L: ms of a block pair of sparse attention.
        pair_share_S: share of a sample's block pairs that each of its ranks computes.
        exchange_2SL: ms of receiving all of a sample's keys and values.
        outside_2SC: ms of a sample in the embedding and the output head.
        outside_sequence_2C: of it, what a sequence costs whatever its length.
        together_2SC: ms of a sample in the experts, which the ranks of a lockstep group divide.
        columns_2XF: ms by feature of each layer without its experts, then of each chunk's embedding
            and output head, then of each chunk's experts; for a sample that no layer attends to
            densely.
        denser_2XF: how much more that is in a layer that does.
    """

    chunk_of_layer_L: np.ndarray
    fixed_2SL: np.ndarray
    sequence_2L: np.ndarray
    pair_2L: np.ndarray
    pair_share_S: np.ndarray
    exchange_2SL: np.ndarray
    outside_2SC: np.ndarray
    outside_sequence_2C: np.ndarray
    together_2SC: np.ndarray
    columns_2XF: np.ndarray
    denser_2XF: np.ndarray

    def subset(self, samples: slice) -> LayerCosts:
        """Costs of some of the samples."""
        return replace(
            self,
            fixed_2SL=self.fixed_2SL[:, samples],
            pair_share_S=self.pair_share_S[samples],
            exchange_2SL=self.exchange_2SL[:, samples],
            outside_2SC=self.outside_2SC[:, samples],
            together_2SC=self.together_2SC[:, samples],
        )

    def shared(self, share_S: np.ndarray, received_S: np.ndarray) -> LayerCosts:
        """Costs on each of the ranks that share a sample.

        Args:
            share_S: of the sample's work that each rank does.
            received_S: of the sample's keys and values that each receives.
        """
        share_S1, received_S1 = share_S[:, None], received_S[:, None]
        sequence_21L, outside_21C = self.sequence_2L[:, None], self.outside_sequence_2C[:, None]
        return replace(
            self,
            fixed_2SL=sequence_21L
            + share_S1 * (self.fixed_2SL - sequence_21L)
            + received_S1 * self.exchange_2SL,
            pair_share_S=share_S * self.pair_share_S,
            exchange_2SL=np.zeros_like(self.exchange_2SL),
            outside_2SC=outside_21C + share_S1 * (self.outside_2SC - outside_21C),
            together_2SC=share_S1 * self.together_2SC,
        )

    def own_2SL(self, pairs_LS: np.ndarray) -> np.ndarray:
        """[2, S, L] ms of samples that attend so many block pairs in each layer."""
        pairs_SL = (pairs_LS * self.pair_share_S).T
        return self.fixed_2SL + self.pair_2L[:, None] * pairs_SL
