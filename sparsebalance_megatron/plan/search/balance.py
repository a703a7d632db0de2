# SPDX-License-Identifier: Apache-2.0
"""Samples to micro-batches: in order of arrival, balanced by tokens or by predicted latency, or in
rows of equal height for ranks that wait for one another in every layer.

All functions are deterministic; ties go to the lower index. A placement is
``placement[rank][micro_batch]``, a tuple of sample indices. A row is the micro-batches of a
lockstep group at one position, one bin for each member. It takes as long as its fullest bin, its
height.

Shape legend: X rows, W bins of a row, J = X x W bins.
"""

import heapq
from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Placement
from sparsebalance_megatron.plan.job import Job


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
    shape = job.micro_batches, job.data_parallel_size, size
    samples_RMI = np.arange(len(lengths_tokens)).reshape(shape).swapaxes(0, 1)
    tokens_RM = np.asarray(lengths_tokens)[samples_RMI].sum(axis=2)
    for rank_index, m in np.argwhere(tokens_RM > cap_tokens):
        tokens = tokens_RM[rank_index, m]
        raise PlanError(
            f"arrival order: rank {rank_index}, micro-batch {m} has {tokens} tokens, the cap is "
            f"{cap_tokens}; raise --sparse-balance-max-tokens-per-micro-batch to {tokens} or "
            "choose another --sparse-balance-batching"
        )
    return tuple(tuple(map(tuple, of_rank)) for of_rank in samples_RMI.tolist())


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
    weights, tokens, samples = (
        list(map(float, weights_S)),
        list(lengths_tokens),
        range(len(weights_S)),
    )
    slowness = [1.0] * job.data_parallel_size if slowness_R is None else slowness_R.tolist()
    positions, alike = job.micro_batches, [1.0] * job.micro_batches
    by_rank = _pack(samples, weights, tokens, slowness, cap_tokens * positions, minimum=positions)
    ranks = [_pack(held, weights, tokens, alike, cap_tokens) for held in by_rank or ()]
    if by_rank is None or None in ranks:
        micro_batches = _in_micro_batches(weights, tokens, job.places, cap_tokens)
        weight_J = [sum(weights[sample] for sample in held) for held in micro_batches]
        one_J = [1] * job.places
        by_rank = _pack(range(job.places), weight_J, one_J, slowness, positions, minimum=positions)
        ranks = [[micro_batches[index] for index in held] for held in by_rank or ()]
    return tuple(tuple(sorted(map(tuple, map(sorted, rank or ())))) for rank in ranks)


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


def _in_micro_batches(
    weights: list[float], tokens: list[int], places: int, cap_tokens: int
) -> list[list[int]]:
    """Samples by micro-batch, as the cap allows: by weight, else by tokens, else each where it
    leaves least room."""
    samples, alike, tokens_S = range(len(tokens)), [1.0] * places, np.array(tokens)
    by_tokens = list(map(float, tokens))
    for by in (weights, by_tokens):
        if found := _pack(samples, by, tokens, alike, cap_tokens):
            return found
    full_J = np.full(places, float(cap_tokens))
    for packing in packed_rows(tokens_S, tokens_S, places, 1, cap_tokens, full_J):
        return [list(micro_batch) for (micro_batch,) in packing]
    loose = _pack(samples, by_tokens, tokens, alike, sum(tokens)) or []
    enough = max(sum(tokens[sample] for sample in micro_batch) for micro_batch in loose)
    raise PlanError(
        f"{len(tokens)} samples of {sum(tokens)} tokens do not fit into {places} "
        f"micro-batches of {cap_tokens} tokens; "
        f"--sparse-balance-max-tokens-per-micro-batch {enough} would do"
    )


def _pack(
    items: Sequence[int],
    weights: list[float],
    tokens: list[int],
    slowness: list[float],
    capacity: int,
    minimum: int = 1,
) -> list[list[int]] | None:
    """LPT: the heaviest item first, each into the lightest bin that has room.

    Every bin ends with at least ``minimum`` items, and its load counts ``slowness`` times. None
    where an item finds no room.
    """
    order, bins = sorted(items, key=lambda item: -weights[item]), len(slowness)
    if len(order) == bins * minimum == bins and max(tokens[item] for item in order) <= capacity:
        return [[item] for item in order]
    members: list[list[int]] = [[] for _ in range(bins)]
    used = [0] * bins
    heap = [(0.0, index) for index in range(bins)]
    missing = bins * minimum
    for placed, item in enumerate(order):
        only_missing = len(order) - placed <= missing
        passed_over = []
        while heap:
            load, index = heap[0]
            if only_missing and len(members[index]) >= minimum:
                heapq.heappop(heap)
            elif used[index] + tokens[item] > capacity:
                passed_over.append(heapq.heappop(heap))
            else:
                break
        if not heap:
            return None
        heapq.heapreplace(heap, (load + weights[item] * slowness[index], index))
        for entry in passed_over:
            heapq.heappush(heap, entry)
        missing -= len(members[index]) < minimum
        members[index].append(item)
        used[index] += tokens[item]
    return members


def packed_rows(
    weights_S: np.ndarray,
    tokens_S: np.ndarray,
    rows: int,
    members: int,
    cap_tokens: int,
    floors_X: np.ndarray | None = None,
) -> list[list[list[tuple[int, ...]]]]:
    """Up to two packings: the samples of the bins of every row, the fullest bin first. None where
    the samples do not fit.

    1. One sample for each bin opens the bins in falling order of weight: so neighbours in weight
       share a row, and no bin is empty. These are the heaviest samples in the one packing, the
       lightest in the other. One sample a bin is the least sum of heights at once.
    2. Each other sample, heaviest first, goes where its row grows least; of equals, where it leaves
       least room below the height. No bin exceeds the cap of tokens.

    Args:
        weights_S: predicted ms of every sample.
        cap_tokens: of a bin.
        floors_X: heights below which a row is filled as if it had them, in falling order.

    >>> packed_rows(np.array([9.0, 4.0, 4.0, 1.0]), np.ones(4, int), 2, 2, 4)
    [[[(0,), (1,)], [(2,), (3,)]]]
    """
    bins = rows * members
    order_S = np.argsort(-weights_S, kind="stable")
    if len(order_S) < bins:
        return []
    floor_J = np.zeros(bins) if floors_X is None else np.repeat(floors_X, members)
    packings = []
    for first in dict.fromkeys((0, len(order_S) - bins)):
        opening_J, others_S = np.split(np.roll(order_S, -first), [bins])
        load_J, used_J = weights_S[opening_J].astype(np.float64), tokens_S[opening_J]
        held_J = [[sample] for sample in opening_J.tolist()]
        for sample in others_S.tolist():
            height_J = np.repeat(load_J.reshape(-1, members).max(axis=1), members)
            over_J = load_J + weights_S[sample] - np.maximum(height_J, floor_J)
            has_room_J = used_J + tokens_S[sample] <= cap_tokens
            grows_J = np.where(has_room_J, np.maximum(over_J, 0.0), np.inf)
            chosen = int(np.where(grows_J <= grows_J.min(), over_J, -np.inf).argmax())
            held_J[chosen].append(sample)
            load_J[chosen] += weights_S[sample]
            used_J[chosen] += tokens_S[sample]
        # A sample that found no room has made its bin exceed the cap.
        if used_J.max() <= cap_tokens:
            order_XW = np.argsort(-load_J.reshape(rows, members), axis=1, kind="stable")
            order_XW += members * np.arange(rows)[:, None]
            packings.append(
                [
                    [tuple(sorted(held_J[chosen])) for chosen in of_row]
                    for of_row in order_XW.tolist()
                ]
            )
    return packings
