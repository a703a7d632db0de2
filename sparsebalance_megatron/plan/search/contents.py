# SPDX-License-Identifier: Apache-2.0
"""Contents of micro-batches, which moves add and subtract, and what they take at a cp_size.

Shape legend: S samples, R data-parallel ranks, P pipeline stages, V virtual stages,
C = P x V chunks, X contents: work and exchange of every chunk and direction, then sequences, tokens
and blocks; I levels of cp_size.
"""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.plan.step_costs import StepCosts

SEQUENCES, TOKENS, BLOCKS = -3, -2, -1
"""Places among contents."""


class Contents:
    """Sums over the samples of a micro-batch, and its times by cp_size.

    Attributes:
        of_sample_SX: contents of every sample.
    """

    def __init__(self, costs: StepCosts, sample_2SC: np.ndarray) -> None:
        samples = len(costs.lengths_tokens_S)
        work_2SC = sample_2SC - costs.sequence_2C[:, None]
        counts_3S = [np.ones(samples), costs.lengths_tokens_S, costs.blocks_S]
        terms = [
            values.transpose(1, 0, 2).reshape(samples, -1)
            for values in (work_2SC, costs.exchange_2SC)
        ]
        self.of_sample_SX = np.concatenate([*terms, np.stack(counts_3S, axis=1)], axis=1)
        self._terms = 2 * costs.chunks
        self._constant = costs.constant_2C.reshape(-1)
        self._sequence = costs.sequence_2C.reshape(-1)
        self._share_W = costs.share_W
        self._received_W = costs.received_W
        self._slowness_IRC = _slowness_of_micro_batches(costs)

    def ms(self, contents: np.ndarray, cp_size: np.ndarray, rank: np.ndarray) -> np.ndarray:
        """Forward then backward ms of every chunk, [..., 2 C], on each rank of micro-batches.

        Args:
            contents: of the micro-batches, [..., X].
            cp_size: of the micro-batches, [...].
            rank: on which the micro-batches begin, [...].
        """
        work, exchange = contents[..., : self._terms], contents[..., self._terms : SEQUENCES]
        ms = work * self._share_W[cp_size][..., None]
        if cp_size.max(initial=1) > 1:
            ms += exchange * self._received_W[cp_size][..., None]
        ms += contents[..., SEQUENCES, None] * self._sequence
        ms += self._constant
        if self._slowness_IRC is not None:
            slowness = self._slowness_IRC[np.frexp(np.maximum(cp_size, 1))[1] - 1, rank]
            ms *= np.concatenate([slowness, slowness], axis=-1)
        return np.asarray(ms)


def _slowness_of_micro_batches(costs: StepCosts) -> np.ndarray | None:
    """Slowness of the slowest of 1, 2, 4, ... ranks from every rank on; None if all are alike."""
    if bool((costs.slowness_RP == 1.0).all()):
        return None
    slowness_RC = np.repeat(costs.slowness_RP, costs.job.virtual_stages, axis=1)
    levels, cp_size = [slowness_RC], 1
    while len(slowness_RC) % (2 * cp_size) == 0:
        cp_size *= 2
        of_micro_batches = slowness_RC.reshape(-1, cp_size, slowness_RC.shape[1]).max(axis=1)
        levels.append(np.repeat(of_micro_batches, cp_size, axis=0))
    return np.stack(levels)
