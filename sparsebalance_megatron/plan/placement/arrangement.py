# SPDX-License-Identifier: Apache-2.0
"""Where every sample of a step runs, with the micro-batches that several ranks share.

Shape legend: S samples of a global batch, R data-parallel ranks, M micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.placement.balance import Placement, micro_batch_of_sample


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Samples by rank and position, and how many ranks share each micro-batch.

    ``samples[rank][position]``: those of the micro-batch that begins on the rank, none where the
    rank takes part in a micro-batch that begins on another. ``cp_sizes_RM``: ranks of the
    micro-batch that each takes part in.
    """

    samples: Placement
    cp_sizes_RM: np.ndarray

    @classmethod
    def of_groups(cls, placement: Placement, cp_size: int = 1) -> Arrangement:
        """Every micro-batch of a placement onto groups of so many ranks."""
        nothing = tuple(() for _ in placement[0])
        samples = tuple(
            micro_batches
            for group in placement
            for micro_batches in (group, *[nothing] * (cp_size - 1))
        )
        cp_sizes_RM = np.full((len(samples), len(nothing)), cp_size)
        return cls(samples=samples, cp_sizes_RM=cp_sizes_RM)

    def same_as(self, other: Arrangement) -> bool:
        """Whether every sample runs at the same place, shared by as many ranks."""
        cp_sizes_agree = np.array_equal(self.cp_sizes_RM, other.cp_sizes_RM)
        return self.samples == other.samples and cp_sizes_agree

    @property
    def micro_batch_of_S(self) -> np.ndarray:
        """The place ``rank * M + position`` where every sample's micro-batch begins."""
        return micro_batch_of_sample(
            self.samples, sum(len(micro_batch) for rank in self.samples for micro_batch in rank)
        )

    def cp_size(self, rank: int, position: int) -> int:
        """Ranks of the micro-batch that a rank takes part in."""
        return int(self.cp_sizes_RM[rank, position])
