# SPDX-License-Identifier: Apache-2.0
"""Exchange of samples between consecutive global batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.plan.step_plan import PlanError

_RUN_PER_RANK = 2
_HEAVIEST_OVER_MEAN = 2.0


def assign_window(
    costs: Sequence[float] | np.ndarray,
    batches: int,
    batch_size: int,
    *,
    data_parallel_size: int = 1,
) -> tuple[tuple[int, ...], ...]:
    """Share out the samples of ``batches`` consecutive global batches.

    A step waits for its slowest rank, so a sample far heavier than the rest costs least where the
    other ranks have one like it, and where its batch is heavy enough to hide it. Samples are
    therefore dealt, heaviest first, in runs of two neighbours by cost for every rank. Every batch
    gets one such run; from then on the next run goes to the batch that lacks most until its
    heaviest sample is twice its mean. Longer runs or a lower multiple would be faster still and the
    batches less alike. A pure function of its arguments.

    Returns:
        For each batch, ascending indices into ``costs``; each index exactly once.

    Raises:
        PlanError: ``costs`` does not hold ``batches * batch_size`` finite values.
    """
    costs_S = np.asarray(costs, dtype=np.float64)
    if min(batches, batch_size, data_parallel_size) < 1 or costs_S.shape != (batches * batch_size,):
        raise PlanError(
            f"window: {costs_S.size} samples for {batches} batches of {batch_size} over "
            f"{data_parallel_size} ranks"
        )
    if not np.isfinite(costs_S).all():
        raise PlanError(f"window: cost of sample {int(np.argmin(np.isfinite(costs_S)))} not finite")
    order = np.argsort(-costs_S, kind="stable")
    members: list[list[int]] = [[] for _ in range(batches)]
    totals, room = np.zeros(batches), np.full(batches, batch_size)
    wanted_totals = np.full(batches, np.inf)
    while len(order):
        size = min(_RUN_PER_RANK * data_parallel_size, len(order), int(room.max()))
        lacking = np.where(room >= size, wanted_totals - totals, -np.inf)
        chosen = int(lacking.argmax())
        run, order = order[:size], order[size:]
        if not members[chosen]:
            wanted_totals[chosen] = batch_size * costs_S[run[0]] / _HEAVIEST_OVER_MEAN
        members[chosen] += run.tolist()
        totals[chosen] += costs_S[run].sum()
        room[chosen] -= size
    return tuple(tuple(sorted(batch)) for batch in members)
