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
from sparsebalance_megatron.plan.placement.wide_moves import Rules
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_plan import JobShape, PlanError


def wide_start(weights_S: np.ndarray, costs: StepCosts, rules: Rules) -> Arrangement:
    """Samples in slots of the least width under the token cap, then as wide as places are left.

    A sample is given a slot of its own, with the least width at which its share of the tokens fits
    under the cap; where no place is left for that, samples share slots, lightest first. Places that
    are left widen the slots that weigh most per rank.

    Args:
        weights_S: cost of every sample on a rank by itself.

    Raises:
        PlanError: the samples are too few for so many ranks, or have too many tokens.
    """
    slots = _Slots(weights_S, costs, rules)
    places = costs.job.slots
    wanted_S = slots.least_widths()
    for sample in np.lexsort((-weights_S, -wanted_S)).tolist():
        width = int(wanted_S[sample])
        if width <= places:
            slots.open(sample, width)
            places -= width
        else:
            slots.share(sample)
    while places:
        places -= slots.widen(places)
    return slots.arranged(costs.job)


class _Slots:
    """Slots that are opened, shared and widened one by one."""

    def __init__(self, weights_S: np.ndarray, costs: StepCosts, rules: Rules) -> None:
        self.weights_S, self.rules = weights_S, rules
        self.tokens_S, self.blocks_S = costs.lengths_tokens_S, costs.blocks_S
        self.members: list[list[int]] = []
        self.width_J = np.zeros(costs.job.slots, dtype=np.int64)
        self.weight_J = np.zeros(costs.job.slots)
        self.tokens_J, self.blocks_J = np.zeros_like(self.width_J), np.zeros_like(self.width_J)

    def least_widths(self) -> np.ndarray:
        """[S] under the cap."""
        width_S = np.ones(len(self.weights_S), dtype=np.int64)
        while (over_S := self.tokens_S > self.rules.cap_tokens * width_S).any():
            if width_S.max() >= self.rules.max_width:
                raise self.no_room(int(over_S.argmax()))
            width_S[over_S] *= 2
        return width_S

    def no_room(self, sample: int) -> PlanError:
        return PlanError(
            f"sample {sample} ({self.tokens_S[sample]} tokens) fits in no slot of "
            f"{self.rules.cap_tokens} tokens per rank, up to {self.rules.max_width} ranks; raise "
            "--sparse-balance-max-tokens-per-micro-batch or --sparse-balance-max-context-parallel"
        )

    def open(self, sample: int, width: int) -> None:
        slot = len(self.members)
        self.width_J[slot] = width
        self.members.append([])
        self._add(sample, slot)

    def share(self, sample: int) -> None:
        """Put a sample where the weight per rank is least and the cap allows it."""
        open_ = slice(len(self.members))
        width_J = self.width_J[open_]
        fits_J = self.tokens_J[open_] + self.tokens_S[sample] <= self.rules.cap_tokens * width_J
        if not fits_J.any():
            raise self.no_room(sample)
        self._add(sample, int(np.where(fits_J, self.weight_J[open_] / width_J, np.inf).argmin()))

    def _add(self, sample: int, slot: int) -> None:
        self.members[slot].append(sample)
        self.weight_J[slot] += self.weights_S[sample]
        self.tokens_J[slot] += self.tokens_S[sample]
        self.blocks_J[slot] += self.blocks_S[sample]

    def widen(self, places: int) -> int:
        """Double the slot with the most weight per rank; places it took.

        One with a block for every rank, if there is any: others compute padding on some.
        """
        wider_J = 2 * self.width_J
        able_J = (self.width_J > 0) & (wider_J <= self.rules.max_width) & (self.width_J <= places)
        if not able_J.any():
            raise PlanError(
                f"{len(self.weights_S)} samples cannot fill every position of every rank with "
                f"slots of up to {self.rules.max_width} ranks; raise --micro-batch-size or lower "
                "--context-parallel-size"
            )
        enough_J = able_J & (self.blocks_J >= wider_J)
        choice_J = enough_J if enough_J.any() else able_J
        slot = int(np.where(choice_J, self.weight_J / np.maximum(self.width_J, 1), -1.0).argmax())
        self.width_J[slot] *= 2
        return int(self.width_J[slot]) // 2

    def arranged(self, job: JobShape) -> Arrangement:
        """Widest slots first, each in the island with the least load that has room."""
        max_width = self.rules.max_width
        islands = job.data_parallel_size // max_width
        nothing: tuple[int, ...] = ()
        samples = [[nothing] * job.micro_batches for _ in range(job.data_parallel_size)]
        widths_RM = np.ones((job.data_parallel_size, job.micro_batches), dtype=np.int64)
        used = np.zeros((islands, job.micro_batches), dtype=np.int64)
        loads = [(0.0, island) for island in range(islands)]
        opened = len(self.members)
        for slot in np.lexsort((-self.weight_J[:opened], -self.width_J[:opened])).tolist():
            width, passed_over = int(self.width_J[slot]), []
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
            for entry in (*passed_over, (load + float(self.weight_J[slot]), island)):
                heapq.heappush(loads, entry)
        return Arrangement(
            samples=tuple(tuple(rank) for rank in samples),
            widths_RM=widths_RM if widths_RM.max() > 1 else None,
        )
