# SPDX-License-Identifier: Apache-2.0
"""Exchange of samples between consecutive global batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsebalance_megatron.plan.step_plan import PlanError


def assign_window(
    costs: Sequence[float], batches: int, batch_size: int, *, data_parallel_size: int = 1
) -> tuple[tuple[int, ...], ...]:
    """Share out the samples of ``batches`` consecutive global batches.

    A step waits for its slowest rank, so a sample far heavier than the rest costs least where the
    other ranks have one like it. Samples are therefore dealt, heaviest first, in runs of
    ``data_parallel_size`` neighbours by cost; each run goes to the batch with the least total cost
    that has room for it, so the totals stay alike too. A pure function of its arguments.

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
    while len(order):
        wanted = min(data_parallel_size, len(order))
        size = min(wanted, int(room.max()))
        chosen = int(np.where(room >= size, totals, np.inf).argmin())
        run, order = order[:size], order[size:]
        members[chosen] += run.tolist()
        totals[chosen] += costs_S[run].sum()
        room[chosen] -= size
    return tuple(tuple(sorted(batch)) for batch in members)
