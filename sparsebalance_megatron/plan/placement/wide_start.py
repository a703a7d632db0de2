# SPDX-License-Identifier: Apache-2.0
"""A first placement whose slots are as wide as their samples ask for.

Widths are powers of two. Taken from the widest to the narrowest they fill every position of every
island, an island being as many neighbouring ranks as the widest slot may have, without gaps and
each at a multiple of its width.

Shape legend: S samples of a global batch, R data-parallel ranks, M micro-batches, J slots.
"""

from __future__ import annotations

import heapq

import numpy as np

from sparsebalance_megatron.plan.placement.arrangement import Arrangement
from sparsebalance_megatron.plan.step_plan import JobShape, PlanError


def wide_start(
    weights_S: np.ndarray,
    tokens_S: np.ndarray,
    blocks_S: np.ndarray,
    job: JobShape,
    *,
    cap_tokens: int,
    max_width: int,
    most_over_mean: float = np.inf,
) -> Arrangement:
    """Samples in slots of the least width under the token cap, then as wide as places are left.

    A sample is given a slot of its own, with the least width at which its share of the tokens fits
    under the cap and its share of the weight is at most ``most_over_mean`` times the mean of all
    places; where no place is left for that, samples share slots, lightest first. Places that are
    left widen the slots that weigh most per rank.

    Args:
        weights_S: cost of every sample on a rank by itself.
        cap_tokens: of one rank's share of a slot.
        max_width: of a slot, a power of two that divides the ranks.

    Raises:
        PlanError: the samples are too few for so many ranks, or have too many tokens.
    """
    slots = _Slots(weights_S, tokens_S, blocks_S, cap_tokens, max_width)
    mean = float(weights_S.sum()) / job.slots
    places = job.slots
    wanted_S = slots.least_widths(most_over_mean * mean)
    for sample in np.lexsort((np.arange(len(weights_S)), -weights_S, -wanted_S)).tolist():
        width = int(wanted_S[sample])
        while width > 1 and width > places and tokens_S[sample] * 2 <= cap_tokens * width:
            width //= 2
        if width <= places:
            slots.open(sample, width)
            places -= width
        else:
            slots.share(sample)
    while places:
        places -= slots.widen(places)
    return slots.arranged(job, max_width)


class _Slots:
    """Slots that are opened, shared and widened one by one."""

    def __init__(
        self,
        weights_S: np.ndarray,
        tokens_S: np.ndarray,
        blocks_S: np.ndarray,
        cap_tokens: int,
        max_width: int,
    ) -> None:
        self.weights_S, self.tokens_S, self.blocks_S = weights_S, tokens_S, blocks_S
        self.cap_tokens, self.max_width = cap_tokens, max_width
        self.members: list[list[int]] = []
        self.widths: list[int] = []

    def least_widths(self, most_weight: float) -> np.ndarray:
        """[S] under the cap, as far as blocks go round, with at most so much weight per rank."""
        width_S = np.ones(len(self.weights_S), dtype=np.int64)
        while True:
            over_S = (self.tokens_S > self.cap_tokens * width_S) | (
                (self.weights_S > most_weight * width_S) & (self.blocks_S >= 2 * width_S)
            )
            grows_S = over_S & (width_S < self.max_width)
            if not grows_S.any():
                break
            width_S[grows_S] *= 2
        too_long_S = self.tokens_S > self.cap_tokens * self.max_width
        if too_long_S.any():
            raise self.no_room(int(too_long_S.argmax()))
        return width_S

    def no_room(self, sample: int) -> PlanError:
        return PlanError(
            f"sample {sample} ({self.tokens_S[sample]} tokens) fits in no slot of "
            f"{self.cap_tokens} tokens per rank, up to {self.max_width} ranks; raise "
            "--sparse-balance-max-tokens-per-micro-batch or --sparse-balance-max-context-parallel"
        )

    def open(self, sample: int, width: int) -> None:
        self.members.append([sample])
        self.widths.append(width)

    def share(self, sample: int) -> None:
        """Put a sample where the weight per rank is least and the cap allows it."""
        tokens = int(self.tokens_S[sample])
        fits = [
            (self._weight(slot) / width, slot)
            for slot, width in enumerate(self.widths)
            if self._tokens(slot) + tokens <= self.cap_tokens * width
        ]
        if not fits:
            raise self.no_room(sample)
        self.members[min(fits)[1]].append(sample)

    def widen(self, places: int) -> int:
        """Double the slot with the most weight per rank; places it took.

        One with a block for every rank, if there is any: others compute padding on some.
        """
        able = [
            (
                bool(self.blocks_S[self.members[slot]].sum() >= 2 * width),
                self._weight(slot) / width,
                -slot,
            )
            for slot, width in enumerate(self.widths)
            if 2 * width <= self.max_width and width <= places
        ]
        if not able:
            raise PlanError(
                f"{len(self.weights_S)} samples cannot fill every position of every rank with "
                f"slots of up to {self.max_width} ranks; raise --micro-batch-size or lower "
                "--context-parallel-size"
            )
        slot = -max(able)[2]
        taken = self.widths[slot]
        self.widths[slot] *= 2
        return taken

    def arranged(self, job: JobShape, max_width: int) -> Arrangement:
        """Widest slots first, each in the island with the least load that has room."""
        islands = job.data_parallel_size // max_width
        nothing: tuple[int, ...] = ()
        samples = [[nothing] * job.micro_batches for _ in range(job.data_parallel_size)]
        widths_RM = np.ones((job.data_parallel_size, job.micro_batches), dtype=np.int64)
        used = np.zeros((islands, job.micro_batches), dtype=np.int64)
        loads = [(0.0, island) for island in range(islands)]
        order = sorted(
            range(len(self.widths)),
            key=lambda slot: (-self.widths[slot], -self._weight(slot), slot),
        )
        for slot in order:
            width, passed_over = self.widths[slot], []
            while True:
                load, island = heapq.heappop(loads)
                position = int(used[island].argmin())
                if used[island, position] + width <= max_width:
                    break
                passed_over.append((load, island))
            rank = island * max_width + int(used[island, position])
            samples[rank][position] = tuple(sorted(self.members[slot]))
            widths_RM[rank : rank + width, position] = width
            used[island, position] += width
            for entry in (*passed_over, (load + self._weight(slot), island)):
                heapq.heappush(loads, entry)
        return Arrangement(
            samples=tuple(tuple(rank) for rank in samples),
            widths_RM=widths_RM if widths_RM.max() > 1 else None,
        )

    def _weight(self, slot: int) -> float:
        return float(self.weights_S[self.members[slot]].sum())

    def _tokens(self, slot: int) -> int:
        return int(self.tokens_S[self.members[slot]].sum())
