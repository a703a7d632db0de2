# SPDX-License-Identifier: Apache-2.0
"""Samples to micro-batches: in order of arrival, balanced by tokens, or balanced by predicted
latency.

Every function returns ``placement[rank][micro_batch]``, a tuple of sample indices. All are
deterministic; ties go to the lower index.

Shape legend: S samples of a global batch, R data-parallel ranks.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.placement.arrangement import Placement
from sparsebalance_megatron.plan.plan_error import PlanError


class _NoRoomError(Exception):
    """A sample fits in no bin that may take it."""

    def __init__(self, sample: int) -> None:
        super().__init__(sample)
        self.sample = sample


def arrival(lengths_tokens: Sequence[int], job: Job, cap_tokens: int) -> Placement:
    """Contiguous micro-batches in the order of ``MegatronPretrainingSampler``.

    Micro-batch m of rank d holds samples ``(m * D + d) * size`` to ``+ size``.

    Raises:
        PlanError: the samples do not divide evenly over the micro-batches, or a micro-batch exceeds
        the cap.
    """
    _check_samples(lengths_tokens, job, cap_tokens)
    size, rest = divmod(len(lengths_tokens), job.places)
    if rest:
        raise PlanError(
            f"arrival order: {len(lengths_tokens)} samples do not divide over {job.places} "
            "micro-batches; make the global batch a multiple of micro batch size x data-parallel "
            "size"
        )
    placement = tuple(
        tuple(
            tuple(range(first := (m * job.data_parallel_size + d) * size, first + size))
            for m in range(job.micro_batches)
        )
        for d in range(job.data_parallel_size)
    )
    for rank_index, rank in enumerate(placement):
        for m, micro_batch in enumerate(rank):
            tokens = sum(lengths_tokens[sample] for sample in micro_batch)
            if tokens > cap_tokens:
                raise PlanError(
                    f"arrival order: rank {rank_index}, micro-batch {m} has {tokens} tokens, the "
                    f"cap is {cap_tokens}; raise --sparse-balance-max-tokens-per-micro-batch to "
                    f"{tokens} or choose another --sparse-balance-batching"
                )
    return placement


def balanced(
    weights_S: np.ndarray,
    lengths_tokens: Sequence[int],
    job: Job,
    cap_tokens: int,
    slowness_R: np.ndarray | None = None,
) -> Placement:
    """Balance ``weights_S`` (tokens: LBB; predicted latency: SAB) under a token cap per
    micro-batch.

    As published, samples go to ranks first and to the micro-batches of their rank second, heaviest
    first to the lightest bin (LPT). Where the cap defeats that, samples go to micro-batches first
    and micro-batches to ranks second. Micro-batches of a rank run in order of their first sample,
    which favours no position. The load of a rank counts ``slowness_R`` times, by default once.

    Raises:
        PlanError: too few samples, or the samples do not fit under the cap.
    """
    _check_samples(lengths_tokens, job, cap_tokens)
    weights_S = np.asarray(weights_S, dtype=np.float64)
    tokens_S = np.asarray(lengths_tokens, dtype=np.int64)
    slowness_R = np.ones(job.data_parallel_size) if slowness_R is None else slowness_R
    try:
        ranks = _ranks_then_micro_batches(weights_S, tokens_S, job, cap_tokens, slowness_R)
    except _NoRoomError:
        ranks = _micro_batches_then_ranks(weights_S, tokens_S, job, cap_tokens, slowness_R)
    return tuple(
        tuple(sorted(tuple(sorted(micro_batch)) for micro_batch in rank)) for rank in ranks
    )


def _check_samples(lengths_tokens: Sequence[int], job: Job, cap_tokens: int) -> None:
    if len(lengths_tokens) < job.places:
        raise PlanError(
            f"{len(lengths_tokens)} samples cannot fill {job.places} micro-batches "
            f"({job.data_parallel_size} ranks x {job.micro_batches} micro-batches)"
        )
    longest = int(np.argmax(lengths_tokens))
    if lengths_tokens[longest] > cap_tokens:
        raise PlanError(
            f"sample {longest} has {lengths_tokens[longest]} tokens, the cap of a micro-batch is "
            f"{cap_tokens}; raise --sparse-balance-max-tokens-per-micro-batch to "
            f"{lengths_tokens[longest]} or shorten the sample"
        )


def _ranks_then_micro_batches(
    weights_S: np.ndarray,
    tokens_S: np.ndarray,
    job: Job,
    cap_tokens: int,
    slowness_R: np.ndarray,
) -> list[list[list[int]]]:
    by_rank = _pack(
        weights_S,
        tokens_S,
        job.data_parallel_size,
        capacity=cap_tokens * job.micro_batches,
        minimum=job.micro_batches,
        slowness=slowness_R,
    )
    ranks = []
    for rank in by_rank:
        members = np.array(rank)
        micro_batches = _pack(
            weights_S[members], tokens_S[members], job.micro_batches, capacity=cap_tokens, minimum=1
        )
        ranks.append([members[micro_batch].tolist() for micro_batch in micro_batches])
    return ranks


def _micro_batches_then_ranks(
    weights_S: np.ndarray,
    tokens_S: np.ndarray,
    job: Job,
    cap_tokens: int,
    slowness_R: np.ndarray,
) -> list[list[list[int]]]:
    micro_batches = _fit_micro_batches(weights_S, tokens_S, job.places, cap_tokens)
    micro_batch_weights = np.array([weights_S[micro_batch].sum() for micro_batch in micro_batches])
    by_rank = _pack(
        micro_batch_weights,
        np.ones(job.places, dtype=np.int64),
        job.data_parallel_size,
        capacity=job.micro_batches,
        minimum=job.micro_batches,
        slowness=slowness_R,
    )
    return [[micro_batches[index] for index in rank] for rank in by_rank]


def _fit_micro_batches(
    weights_S: np.ndarray, tokens_S: np.ndarray, micro_batches: int, cap_tokens: int
) -> list[list[int]]:
    for order_weights in (weights_S, tokens_S.astype(np.float64)):
        try:
            return _pack(order_weights, tokens_S, micro_batches, capacity=cap_tokens, minimum=1)
        except _NoRoomError as problem:
            sample = problem.sample
    tight = _first_fit_decreasing(tokens_S, micro_batches, cap_tokens)
    if tight is not None:
        return tight
    loose = _pack(tokens_S.astype(np.float64), tokens_S, micro_batches, capacity=None, minimum=1)
    enough = max(int(tokens_S[micro_batch].sum()) for micro_batch in loose)
    raise PlanError(
        f"sample {sample} ({tokens_S[sample]} tokens) fits in none of {micro_batches} "
        f"micro-batches of {cap_tokens} tokens; "
        f"--sparse-balance-max-tokens-per-micro-batch {enough} would do"
    )


def _pack(
    weights: np.ndarray,
    tokens: np.ndarray,
    bins: int,
    *,
    capacity: int | None,
    minimum: int,
    slowness: np.ndarray | None = None,
) -> list[list[int]]:
    """LPT under a capacity, every bin with at least ``minimum`` items; one ejection per item.

    A bin's load counts ``slowness`` times.
    """
    order = np.argsort(-weights, kind="stable").tolist()
    slowness = np.ones(bins) if slowness is None else slowness
    quick = _pack_without_ejection(weights, tokens, order, slowness, capacity, minimum)
    if quick is not None:
        return quick
    packing = _Packing(weights, tokens, slowness, capacity)
    for placed, item in enumerate(order):
        missing = np.maximum(minimum - packing.count, 0)
        allowed = np.ones(bins, dtype=bool)
        if len(order) - placed <= missing.sum():
            allowed = missing > 0
        packing.place(item, allowed)
    return packing.members


def _pack_without_ejection(
    weights: np.ndarray,
    tokens: np.ndarray,
    order: list[int],
    slowness: np.ndarray,
    capacity: int | None,
    minimum: int,
) -> list[list[int]] | None:
    """Pack as :func:`_pack` does, from a heap in S log S; None where an item finds no room."""
    bins = len(slowness)
    if minimum == 1 and len(order) == bins and (capacity is None or tokens.max() <= capacity):
        return [[item] for item in order]
    members: list[list[int]] = [[] for _ in range(bins)]
    used = [0] * bins
    heap = [(0.0, index) for index in range(bins)]
    missing = bins * minimum
    weight_of, tokens_of, slowness_of = weights.tolist(), tokens.tolist(), slowness.tolist()
    for placed, item in enumerate(order):
        only_missing = len(order) - placed <= missing
        passed_over = []
        chosen = None
        while heap:
            load, index = heap[0]
            if only_missing and len(members[index]) >= minimum:
                heapq.heappop(heap)
                continue
            if capacity is None or used[index] + tokens_of[item] <= capacity:
                chosen = index
                heapq.heapreplace(heap, (load + weight_of[item] * slowness_of[index], index))
                break
            passed_over.append(heapq.heappop(heap))
        if chosen is None:
            return None
        for entry in passed_over:
            heapq.heappush(heap, entry)
        missing -= len(members[chosen]) < minimum
        members[chosen].append(item)
        used[chosen] += tokens_of[item]
    return members


class _Packing:
    """Bins that items are placed into one by one, each in the lightest bin that may take it."""

    def __init__(
        self,
        weights: np.ndarray,
        tokens: np.ndarray,
        slowness: np.ndarray,
        capacity: int | None,
    ) -> None:
        self.weights, self.tokens, self.slowness = weights, tokens, slowness
        bins = len(slowness)
        self.capacity = int(tokens.sum()) if capacity is None else capacity
        self.load = np.zeros(bins)
        self.used = np.zeros(bins, dtype=np.int64)
        self.count = np.zeros(bins, dtype=np.int64)
        self.members: list[list[int]] = [[] for _ in range(bins)]

    def place(self, item: int, allowed: np.ndarray) -> None:
        chosen = self._lightest(allowed & (self.used + self.tokens[item] <= self.capacity))
        self._add(item, self._make_room(item, allowed) if chosen is None else chosen)

    def _lightest(self, fits: np.ndarray) -> int | None:
        return int(np.where(fits, self.load, np.inf).argmin()) if fits.any() else None

    def _make_room(self, item: int, allowed: np.ndarray) -> int:
        """Move one placed item so that ``item`` fits; returns the bin that has room now.

        The bin with room ends with as many items as before, so it is the receiver of the ejected
        item that must be among ``allowed``.
        """
        best = None
        for source, held in enumerate(self.members):
            for other in held:
                freed = self.used[source] - self.tokens[other]
                if freed + self.tokens[item] > self.capacity:
                    continue
                room = allowed & (self.used + self.tokens[other] <= self.capacity)
                room[source] = False
                target = self._lightest(room)
                if target is not None:
                    load = self.load[target] + self.weights[other] * self.slowness[target]
                    key = (load, source, other, target)
                    best = key if best is None else min(best, key)
        if best is None:
            raise _NoRoomError(item)
        _, source, other, target = best
        self._remove(other, source)
        self._add(other, target)
        return source

    def _add(self, item: int, chosen: int) -> None:
        self.members[chosen].append(item)
        self._account(item, chosen, 1)

    def _remove(self, item: int, chosen: int) -> None:
        self.members[chosen].remove(item)
        self._account(item, chosen, -1)

    def _account(self, item: int, chosen: int, sign: int) -> None:
        self.load[chosen] += sign * self.weights[item] * self.slowness[chosen]
        self.used[chosen] += sign * self.tokens[item]
        self.count[chosen] += sign


def _first_fit_decreasing(
    tokens_S: np.ndarray, micro_batches: int, cap_tokens: int
) -> list[list[int]] | None:
    """Fewest micro-batches first, then empty micro-batches take samples from the fullest; None if
    it fails."""
    members: list[list[int]] = [[] for _ in range(micro_batches)]
    used = np.zeros(micro_batches, dtype=np.int64)
    for sample in np.argsort(-tokens_S, kind="stable").tolist():
        fits = np.flatnonzero(used + tokens_S[sample] <= cap_tokens)
        if not len(fits):
            return None
        members[fits[0]].append(sample)
        used[fits[0]] += tokens_S[sample]
    for empty in [index for index, micro_batch in enumerate(members) if not micro_batch]:
        shared = [index for index, micro_batch in enumerate(members) if len(micro_batch) > 1]
        donor = max(shared, key=lambda index: (used[index], -index))
        sample = members[donor].pop()
        members[empty].append(sample)
        used[donor] -= tokens_S[sample]
        used[empty] += tokens_S[sample]
    return members
