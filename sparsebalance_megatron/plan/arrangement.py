# SPDX-License-Identifier: Apache-2.0
"""Places of all samples of a step, with the micro-batches that several ranks share."""

from dataclasses import dataclass
from functools import cached_property
from itertools import batched

import numpy as np

from sparsebalance_megatron.plan.groups import Groups

Placement = tuple[tuple[tuple[int, ...], ...], ...]
"""``placement[rank][position]``: the samples of a micro-batch."""


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """Samples by rank and position, and how many ranks share each micro-batch.

    ``samples[rank][position]``: those of the micro-batch that begins on the rank, none where the
    rank takes part in a micro-batch that begins on another. ``cp_sizes_RM``: ranks of the
    micro-batch that each takes part in. ``segment_starts_blocks[rank][position]``: where the
    segments of the micro-batch that the rank takes part in begin; empty where every micro-batch of
    the step runs in one piece.
    """

    samples: Placement
    cp_sizes_RM: np.ndarray
    segment_starts_blocks: tuple[tuple[tuple[int, ...], ...], ...] = ()

    @classmethod
    def of_placement(cls, placement: Placement, cp_size: int = 1) -> "Arrangement":
        """Every micro-batch of a placement onto groups of so many ranks."""
        nothing = tuple(() for _ in placement[0])
        samples = tuple(
            micro_batches
            for group in placement
            for micro_batches in (group, *[nothing] * (cp_size - 1))
        )
        cp_sizes_RM = np.full((len(samples), len(nothing)), cp_size)
        return cls(samples=samples, cp_sizes_RM=cp_sizes_RM)

    @classmethod
    def of_places(cls, place_S: np.ndarray, cp_sizes_RM: np.ndarray) -> "Arrangement":
        """Samples by the place ``rank * M + position`` where their micro-batch begins."""
        ranks, positions = cp_sizes_RM.shape
        order_S = np.argsort(place_S, kind="stable")
        edges = np.searchsorted(place_S[order_S], np.arange(1, ranks * positions))
        held = [tuple(part.tolist()) for part in np.split(order_S, edges)]
        return cls(samples=tuple(batched(held, positions)), cp_sizes_RM=cp_sizes_RM)

    @cached_property
    def groups(self) -> Groups:
        """Who shares each micro-batch."""
        return Groups(self.cp_sizes_RM)

    @cached_property
    def micro_batch_of_S(self) -> np.ndarray:
        """The place ``rank * M + position`` where every sample's micro-batch begins."""
        flat = [micro_batch for rank in self.samples for micro_batch in rank]
        sample_I = np.array([sample for micro_batch in flat for sample in micro_batch])
        micro_batch_of_S = np.empty(len(sample_I), dtype=np.int64)
        micro_batch_of_S[sample_I] = np.repeat(np.arange(len(flat)), list(map(len, flat)))
        return micro_batch_of_S

    @property
    def cp_size_S(self) -> np.ndarray:
        """Ranks of every sample's micro-batch."""
        return self.cp_sizes_RM.reshape(-1)[self.micro_batch_of_S]

    @property
    def by_rank(self) -> Placement:
        """The micro-batches that each rank takes part in."""
        flat = [micro_batch for rank in self.samples for micro_batch in rank]
        held = [flat[place] for place in self.groups.first_J.tolist()]
        return tuple(batched(held, self.cp_sizes_RM.shape[1]))

    @property
    def is_cut(self) -> bool:
        """Whether a micro-batch has several segments."""
        return any(len(blocks) > 1 for of_rank in self.segment_starts_blocks for blocks in of_rank)
