# SPDX-License-Identifier: Apache-2.0
"""A first placement whose micro-batches are as wide as their samples ask for.

The cp_sizes are powers of two. Taken from the widest to the narrowest they fill every position of
every rank group, as many neighbouring ranks as the widest micro-batch may have, without
gaps and each at a multiple of its cp_size.

Shape legend: J micro-batches.
"""

from __future__ import annotations

import heapq

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.search.moves import Rules
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_plan import PlanError


def cp_size_start(
    weights_S: np.ndarray, costs: StepCosts, rules: Rules, most_over_mean: float = np.inf
) -> Arrangement:
    """Samples in micro-batches of the least cp_size under the token cap, then as wide as places are
    left.

    A sample is given a micro-batch of its own, with the least cp_size at which its share of the
    tokens fits under the cap and its share of the weight is at most ``most_over_mean`` times the
    mean of all places; where no place is left for that, samples share micro-batches, lightest
    first. Places that are left widen the micro-batches that weigh most per rank.

    Args:
        weights_S: cost of every sample on a rank by itself.

    Raises:
        PlanError: the samples are too few for so many ranks, or have too many tokens.
    """
    micro_batches = _OpenMicroBatches(weights_S, costs, rules)
    places = costs.job.places
    least_S = micro_batches.least_cp_sizes()
    wanted_S = micro_batches.light_cp_sizes(
        least_S, most_over_mean * float(weights_S.sum()) / places
    )
    for sample in np.lexsort((-weights_S, -wanted_S)).tolist():
        cp_size = int(wanted_S[sample])
        while cp_size > places and cp_size > least_S[sample]:
            cp_size //= 2
        if cp_size <= places:
            micro_batches.open(sample, cp_size)
            places -= cp_size
        else:
            micro_batches.share(sample)
    micro_batches.widen(places)
    return micro_batches.arranged(costs.job)


class _OpenMicroBatches:
    """Micro-batches that are opened, shared and widened one by one."""

    def __init__(self, weights_S: np.ndarray, costs: StepCosts, rules: Rules) -> None:
        self.weights_S, self.rules = weights_S, rules
        self.tokens_S, self.blocks_S = costs.lengths_tokens_S, costs.blocks_S
        # Lists: one at a time, their numbers are read much faster than those of arrays.
        self._of_sample = list(
            zip(*(each.tolist() for each in (weights_S, self.tokens_S, self.blocks_S)), strict=True)
        )
        self.members: list[list[int]] = []
        self.cp_size_J: list[int] = []
        self.weight_J: list[float] = []
        self.tokens_J: list[int] = []
        self.blocks_J: list[int] = []
        self._light: list[tuple[float, int]] = []
        """A heap by weight per rank; entries that a later sample made invalid stay in it."""

    def least_cp_sizes(self) -> np.ndarray:
        """[S] under the cap."""
        cp_size_S = np.ones(len(self.weights_S), dtype=np.int64)
        while (over_S := self.tokens_S > self.rules.cap_tokens * cp_size_S).any():
            if cp_size_S.max() >= self.rules.max_cp_size:
                raise self.no_room(int(over_S.argmax()))
            cp_size_S[over_S] *= 2
        return cp_size_S

    def light_cp_sizes(self, least_S: np.ndarray, most_weight: float) -> np.ndarray:
        """[S] with at most so much weight per rank, as far as blocks go round."""
        cp_size_S = least_S.copy()
        while True:
            grows_S = (
                (self.weights_S > most_weight * cp_size_S)
                & (2 * cp_size_S <= self.rules.max_cp_size)
                & (self.blocks_S >= 2 * cp_size_S)
            )
            if not grows_S.any():
                return cp_size_S
            cp_size_S[grows_S] *= 2

    def no_room(self, sample: int) -> PlanError:
        return PlanError(
            f"sample {sample} ({self.tokens_S[sample]} tokens) fits in no micro-batch of "
            f"{self.rules.cap_tokens} tokens per rank, up to {self.rules.max_cp_size} ranks; raise "
            "--sparse-balance-max-tokens-per-micro-batch or --sparse-balance-max-context-parallel"
        )

    def open(self, sample: int, cp_size: int) -> None:
        micro_batch = len(self.members)
        self.members.append([])
        self.cp_size_J.append(cp_size)
        self.weight_J.append(0.0)
        self.tokens_J.append(0)
        self.blocks_J.append(0)
        self._add(sample, micro_batch)

    def share(self, sample: int) -> None:
        """Put a sample where the weight per rank is least and the cap allows it."""
        tokens, full = self._of_sample[sample][1], []
        while self._light:
            entry = weight, micro_batch = heapq.heappop(self._light)
            if weight != self._weight_per_rank(micro_batch):  # of before another sample came
                continue
            cap_tokens = self.rules.cap_tokens * self.cp_size_J[micro_batch]
            if self.tokens_J[micro_batch] + tokens <= cap_tokens:
                break
            full.append(entry)
        else:
            raise self.no_room(sample)
        self._add(sample, micro_batch)
        for entry in full:
            heapq.heappush(self._light, entry)

    def _weight_per_rank(self, micro_batch: int) -> float:
        return self.weight_J[micro_batch] / self.cp_size_J[micro_batch]

    def _add(self, sample: int, micro_batch: int) -> None:
        self.members[micro_batch].append(sample)
        weight, tokens, blocks = self._of_sample[sample]
        self.weight_J[micro_batch] += weight
        self.tokens_J[micro_batch] += tokens
        self.blocks_J[micro_batch] += blocks
        heapq.heappush(self._light, (self._weight_per_rank(micro_batch), micro_batch))

    def widen(self, places: int) -> None:
        """Double micro-batches until they fill so many places more, always that with most weight
        per rank.

        One with a block for every rank, if there is any: others compute padding on some.

        Raises:
            PlanError: no micro-batch may become wider, and places are left.
        """
        heap: list[tuple[bool, float, int]] = []

        def offer(micro_batch: int) -> None:
            padded = self.blocks_J[micro_batch] < 2 * self.cp_size_J[micro_batch]
            heapq.heappush(heap, (padded, -self._weight_per_rank(micro_batch), micro_batch))

        for micro_batch in range(len(self.members)):
            offer(micro_batch)
        while places:
            if not heap:
                raise PlanError(
                    f"{len(self.weights_S)} samples cannot fill every position of every rank with "
                    f"micro-batches of up to {self.rules.max_cp_size} ranks; raise "
                    "--micro-batch-size or lower --context-parallel-size"
                )
            *_, micro_batch = heapq.heappop(heap)
            cp_size = self.cp_size_J[micro_batch]
            # Neither becomes possible later: places only become fewer.
            if 2 * cp_size <= self.rules.max_cp_size and cp_size <= places:
                self.cp_size_J[micro_batch] = 2 * cp_size
                places -= cp_size
                offer(micro_batch)

    def arranged(self, job: Job) -> Arrangement:
        """Widest micro-batches first, each in the rank group with the least load that has room."""
        max_cp_size = self.rules.max_cp_size
        groups = job.data_parallel_size // max_cp_size
        nothing: tuple[int, ...] = ()
        samples = [[nothing] * job.micro_batches for _ in range(job.data_parallel_size)]
        cp_sizes_RM = np.ones((job.data_parallel_size, job.micro_batches), dtype=np.int64)
        used = np.zeros((groups, job.micro_batches), dtype=np.int64)
        loads = [(0.0, group) for group in range(groups)]
        heaviest_widest = np.lexsort((-np.array(self.weight_J), -np.array(self.cp_size_J)))
        for micro_batch in heaviest_widest.tolist():
            cp_size, passed_over = self.cp_size_J[micro_batch], []
            while True:
                load, group = heapq.heappop(loads)
                position = int(used[group].argmin())
                if used[group, position] + cp_size <= max_cp_size:
                    break
                passed_over.append((load, group))
            rank = group * max_cp_size + int(used[group, position])
            samples[rank][position] = tuple(sorted(self.members[micro_batch]))
            cp_sizes_RM[rank : rank + cp_size, position] = cp_size
            used[group, position] += cp_size
            for entry in (*passed_over, (load + self.weight_J[micro_batch], group)):
                heapq.heappush(loads, entry)
        return Arrangement(
            samples=tuple(tuple(rank) for rank in samples),
            cp_sizes_RM=cp_sizes_RM,
        )
