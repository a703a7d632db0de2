# SPDX-License-Identifier: Apache-2.0
"""Placements as other balancers make them, at this package's predicted times.

- *verl* (``verl/utils/seqlen_balancing.py``): samples are divided over ranks so that sums of cost
  are near each other and every rank has as many. Each rank divides its own into as few
  micro-batches as the fullest rank needs under the token cap. All ranks run them in falling order
  of cost, in a pipeline with light ones at both ends.
- *ODC* (arXiv:2601.19362) balances sums over ranks alike and lets no rank wait in a layer: its own
  communication replaces the collectives. The row shows that limit, not this package's runtime.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.plan.arrangement import Placement
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_costs import step_costs
from sparsebalance_megatron.predict.comparison import Row
from sparsebalance_megatron.predict.workload import Workload


class PlacedAsVerl(Workload):
    """Fixed budgets on samples that verl's rule places, by predicted times at those budgets."""

    def planned_steps(
        self, clock: Callable[[], float] = time.perf_counter
    ) -> Iterator[PlannedStep]:
        """One step per batch, in order."""
        planner, layers = self.planner(clock), self.job.layers
        scales = StageScales.ones(self.job.pipeline_stages, self.job.virtual_stages)
        for step, batch in enumerate(self.batches):
            dense_LS = self.plan_settings.dense_LS(layers, batch)
            costs = step_costs(batch, self.job, self.cost, scales, dense_LS)
            base_LS = np.minimum(self.plan_settings.base_LS(layers, batch), costs.blocks_S)
            weights = costs.sample_ms(base_LS).sum(axis=(0, 2)).tolist()
            placed = verl_placement(
                weights, batch, self.job, self.plan_settings.max_tokens_per_micro_batch
            )
            job = replace(self.job, micro_batches=len(placed[0]))
            yield planner.plan(step, batch, job, planner.knowledge(), placement=placed)


def peers_of(workload: Workload) -> dict[str, Workload]:
    """The workload as other balancers plan it, at fixed budgets."""
    fixed = Row({"batching": "latency", "tuning": "off"}, "").of(workload)
    return {
        "verl": PlacedAsVerl(**vars(fixed)),
        "ODC": replace(fixed, job=replace(fixed.job, lockstep_ranks=1)),
    }


def verl_placement(
    weights: Sequence[float], lengths_tokens: Sequence[int], job: Job, cap_tokens: int
) -> Placement:
    """The samples of each rank and micro-batch; as many micro-batches on all ranks.

    Args:
        weights: predicted ms of every sample.

    Raises:
        PlanError: no number of micro-batches keeps all of them under the cap.

    >>> job = Job.even(layers=1, ranks=2, stages=1, micro_batches=2)
    >>> verl_placement([4.0, 3.0, 2.0, 1.0], [4, 3, 2, 1], job, 4)
    (((0,), (3,)), ((1,), (2,)))
    """
    ranks = job.data_parallel_size
    by_rank = _divided(list(range(len(weights))), weights, ranks, alike=True)
    fullest = max(sum(lengths_tokens[sample] for sample in rank) for rank in by_rank)
    fewest = min(map(len, by_rank))
    for count in range(max(1, -(-fullest // cap_tokens)), fewest + 1):
        placed = [_divided(rank, weights, count, alike=False) for rank in by_rank]
        most = max(
            sum(lengths_tokens[sample] for sample in micro_batch)
            for micro_batch in itertools.chain.from_iterable(placed)
        )
        if most <= cap_tokens and all(all(rank) for rank in placed):
            return tuple(_ordered(rank, weights, job) for rank in placed)
    raise PlanError(f"no number of micro-batches up to {fewest} keeps to {cap_tokens} tokens each")


def _ordered(
    micro_batches: list[list[int]], weights: Sequence[float], job: Job
) -> tuple[tuple[int, ...], ...]:
    falling = sorted(
        (tuple(sorted(each)) for each in micro_batches),
        key=lambda each: (-sum(weights[sample] for sample in each), each),
    )
    if job.pipeline_stages == 1:
        return tuple(falling)
    return tuple(falling[::2][::-1] + falling[1::2])


def _divided(
    samples: list[int], weights: Sequence[float], parts: int, *, alike: bool
) -> list[list[int]]:
    """Largest differencing (Karmarkar and Karp): the two sets of parts whose sums differ most are
    joined, heavy parts with light ones, until one set is left.

    Args:
        alike: whether all parts get as many samples.
    """
    order = sorted(samples, key=lambda sample: (-weights[sample], sample))
    groups = (
        [order[first : first + parts] for first in range(0, len(order), parts)]
        if alike
        else [[sample] for sample in order]
    )
    heap: list[tuple[float, int, list[float], list[list[int]]]] = []
    for number, group in enumerate(groups):
        filled = [[sample] for sample in group] + [[] for _ in range(parts - len(group))]
        sums = [float(np.sum([weights[sample] for sample in part])) for part in filled]
        heapq.heappush(heap, (min(sums) - max(sums), number, sums, filled))
    while len(heap) > 1:
        _, number, sums, filled = heapq.heappop(heap)
        _, _, other_sums, other = heapq.heappop(heap)
        heavy = sorted(range(parts), key=lambda part: (-sums[part], part))
        light = sorted(range(parts), key=lambda part: (other_sums[part], part))
        joined = [filled[one] + other[two] for one, two in zip(heavy, light, strict=True)]
        joined_sums = [sums[one] + other_sums[two] for one, two in zip(heavy, light, strict=True)]
        heapq.heappush(heap, (min(joined_sums) - max(joined_sums), number, joined_sums, joined))
    return heap[0][3]
