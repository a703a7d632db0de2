# SPDX-License-Identifier: Apache-2.0
"""A first placement whose micro-batches are as wide as their samples ask for.

The cp_sizes are powers of two. Taken from the widest to the narrowest they fill every position of
every rank group, as many neighbouring ranks as the widest micro-batch may have, without
gaps and each at a multiple of its cp_size.

Shape legend: J micro-batches, B rank groups.
"""

import numpy as np

from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.search.moves import Rules
from sparsebalance_megatron.plan.step_costs import StepCosts


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
    places, tokens_S, blocks_S = costs.job.places, costs.lengths_tokens_S, costs.blocks_S
    most_weight = most_over_mean * float(weights_S.sum()) / places

    def no_room(sample: int) -> PlanError:
        return PlanError(
            f"sample {sample} ({tokens_S[sample]} tokens) fits in no micro-batch of "
            f"{rules.cap_tokens} tokens per rank, up to {rules.max_cp_size} ranks; raise "
            "--sparse-balance-max-tokens-per-micro-batch or --sparse-balance-max-context-parallel"
        )

    least_S, wanted_S = np.ones((2, len(tokens_S)), dtype=np.int64)
    cp_size = 1
    while cp_size < rules.max_cp_size:
        over_S = tokens_S > rules.cap_tokens * cp_size
        heavy_S = (weights_S > most_weight * cp_size) & (blocks_S >= 2 * cp_size)
        heavy_S &= wanted_S == cp_size
        cp_size *= 2
        least_S[over_S], wanted_S[over_S | heavy_S] = cp_size, cp_size
    if (over_S := tokens_S > rules.cap_tokens * cp_size).any():
        raise no_room(int(over_S.argmax()))
    members: list[list[int]] = []
    weight_J, tokens_J, blocks_J = np.zeros((3, places))
    cp_size_J = np.zeros(places, dtype=np.int64)
    for sample in np.lexsort((-weights_S, -wanted_S)).tolist():
        cp_size, chosen = int(wanted_S[sample]), len(members)
        while cp_size > places and cp_size > least_S[sample]:
            cp_size //= 2
        if cp_size <= places:
            members.append([])
            cp_size_J[chosen] = cp_size
            places -= cp_size
        else:
            fits_J = tokens_J + tokens_S[sample] <= rules.cap_tokens * cp_size_J
            if not fits_J.any():
                raise no_room(sample)
            per_rank_J = weight_J / np.maximum(cp_size_J, 1)
            chosen = int(np.where(fits_J, per_rank_J, np.inf).argmin())
        members[chosen].append(sample)
        weight_J[chosen] += weights_S[sample]
        tokens_J[chosen] += tokens_S[sample]
        blocks_J[chosen] += blocks_S[sample]
    used = slice(len(members))
    weight_J, blocks_J, cp_size_J = weight_J[used], blocks_J[used], cp_size_J[used]
    while places:
        able_J = (2 * cp_size_J <= rules.max_cp_size) & (cp_size_J <= places)
        if not able_J.any():
            raise PlanError(
                f"{len(weights_S)} samples cannot fill every position of every rank with "
                f"micro-batches of up to {rules.max_cp_size} ranks; raise "
                "--micro-batch-size or lower --context-parallel-size"
            )
        # One with a block for every rank, if there is any: others compute padding on some.
        full_J = able_J & (blocks_J >= 2 * cp_size_J)
        among_J = full_J if full_J.any() else able_J
        widened = int(np.where(among_J, weight_J / cp_size_J, -np.inf).argmax())
        places -= int(cp_size_J[widened])
        cp_size_J[widened] *= 2
    return _arranged(members, weight_J, cp_size_J, costs.job, rules.max_cp_size)


def _arranged(
    members: list[list[int]], weight_J: np.ndarray, cp_size_J: np.ndarray, job: Job, widest: int
) -> Arrangement:
    """Widest micro-batches first, each in the rank group with the least load that has room."""
    nothing: tuple[int, ...] = ()
    samples = [[nothing] * job.micro_batches for _ in range(job.data_parallel_size)]
    cp_sizes_RM = np.ones((job.data_parallel_size, job.micro_batches), dtype=np.int64)
    used_BM = np.zeros((job.data_parallel_size // widest, job.micro_batches), dtype=np.int64)
    load_B = np.zeros(len(used_BM))
    for micro_batch in np.lexsort((-weight_J, -cp_size_J)).tolist():
        cp_size = int(cp_size_J[micro_batch])
        has_room_B = used_BM.min(axis=1) + cp_size <= widest
        group = int(np.where(has_room_B, load_B, np.inf).argmin())
        position = int(used_BM[group].argmin())
        rank = group * widest + int(used_BM[group, position])
        samples[rank][position] = tuple(sorted(members[micro_batch]))
        cp_sizes_RM[rank : rank + cp_size, position] = cp_size
        used_BM[group, position] += cp_size
        load_B[group] += weight_J[micro_batch]
    return Arrangement(samples=tuple(map(tuple, samples)), cp_sizes_RM=cp_sizes_RM)
