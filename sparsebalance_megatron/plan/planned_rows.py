# SPDX-License-Identifier: Apache-2.0
"""Plans of ranks that wait for one another in every layer: rows, and where they run.

A lockstep group takes, per operation, what its slowest member takes, so it is one rank of the
pipeline whose micro-batches are rows (:mod:`.search.rows`).

1. *Positions.* Without a pipeline, samples are packed into rows of 1, 2, ... up to as many
   positions as the job has; fewer, fuller positions have more equal heights, and average errors of
   prediction. The numbers of positions whose sums of heights are least go on.
2. *Groups.* Rows are placed on groups, ordered and traded between them by the search that places
   samples on ranks (:mod:`.search.annealing`): a row is a sample there, and a group a rank.
3. *Choice.* Of these and of the placements that know nothing of rows, the shortest step wins.

Shape legend: X rows, W members of a group.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.candidate import Candidate, shortest
from sparsebalance_megatron.plan.metrics import rounded_ms
from sparsebalance_megatron.plan.search.annealing import searched
from sparsebalance_megatron.plan.search.balance import balanced
from sparsebalance_megatron.plan.search.lockstep_order import in_lockstep_order
from sparsebalance_megatron.plan.search.rows import Rows, packed_rows
from sparsebalance_megatron.plan.search_effort import SHARE_OF_STEP
from sparsebalance_megatron.plan.step_problem import StepProblem

_MAX_NUMBERS_OF_POSITIONS = 3
"""Numbers of positions whose rows are improved and placed, beside that of the job."""


def best_rows(problem: StepProblem, blind: Iterable[Placement]) -> Candidate | None:
    """The shortest step of ranks in lockstep; None where no placement is found.

    Args:
        problem: of ranks that share no micro-batch.
        blind: placements for ranks that wait for nobody, which compete in their lockstep order.
    """
    found = [
        Candidate.of(of_positions, _placed(of_positions, rows))
        for of_positions, rows in _candidate_rows(problem)
    ]
    for placement in blind:
        where = Arrangement.of_groups(placement)
        where = in_lockstep_order(where, problem.costs, problem.expected_2SC)
        found.append(Candidate.of(problem, where))
    return shortest(*found) if found else None


def _candidate_rows(problem: StepProblem) -> list[tuple[StepProblem, Rows]]:
    """Rows for the most promising numbers of positions, the least sum of heights first."""
    job, costs = problem.job, problem.costs
    groups = job.data_parallel_size // job.lockstep_ranks
    own_2SC, _ = _own_and_together(problem)
    weights_S = own_2SC.sum(axis=(0, 2))
    constant_ms = float(costs.constant_2C.sum())
    numbers = range(1, job.micro_batches + 1) if problem.plans_positions else [job.micro_batches]

    def packed(positions: int, *, evenly: bool) -> Rows | None:
        return packed_rows(
            weights_S,
            costs.lengths_tokens_S,
            rows=groups * positions,
            members=job.lockstep_ranks,
            cap_tokens=problem.cap_tokens,
            evenly=evenly,
        )

    found = []
    for positions in numbers:
        if (rows := packed(positions, evenly=False)) is not None:
            heights_ms = rows.heights_X.sum() + groups * positions * constant_ms
            found.append((rounded_ms(heights_ms), positions, rows))
    found.sort(key=lambda each: each[:2])
    best = found[:_MAX_NUMBERS_OF_POSITIONS]
    best += [each for each in found[len(best) :] if each[1] == job.micro_batches]
    return [
        (problem.with_positions(positions), _lower(rows, packed(positions, evenly=True)))
        for _, positions, rows in best
    ]


def _lower(rows: Rows, even: Rows | None) -> Rows:
    """The packing, improved, or an even one where that is no higher. A group takes part by part of
    a layer what its slowest member takes, so that bins as full as the fullest are not free: one
    with many short samples is the slowest in other parts than one with a long one."""
    rows.improve()
    if even is None or rounded_ms(even.heights_X.sum()) > rounded_ms(rows.heights_X.sum()):
        return rows
    even.improve()
    return even


def _own_and_together(problem: StepProblem) -> tuple[np.ndarray, np.ndarray]:
    """[2, S, C] ms at the expected budgets of what ranks do by themselves, and of what the members
    of a group divide: their experts."""
    assert problem.costs.layers is not None, "ranks that wait in layers have costs by layer"
    together_2SC = problem.costs.layers.together_2SC
    return problem.expected_2SC - together_2SC, together_2SC


def _placed(problem: StepProblem, rows: Rows) -> Arrangement:
    """Rows on groups, in the order in which each group's pipeline is shortest."""
    job, costs = problem.job, problem.costs
    bins = rows.samples
    own_2SC, together_2SC = _own_and_together(problem)

    def of_bins(values_2SC: np.ndarray, row: tuple[tuple[int, ...], ...]) -> np.ndarray:
        return np.stack([values_2SC[:, list(samples)].sum(axis=1) for samples in row])

    row_2XC = np.stack(
        [
            of_bins(own_2SC, row).max(axis=0) + of_bins(together_2SC, row).mean(axis=0)
            for row in bins
        ],
        axis=1,
    )
    groups = job.data_parallel_size // job.lockstep_ranks
    of_groups = replace(
        costs,
        job=replace(job, data_parallel_size=groups, lockstep_ranks=1),
        lengths_tokens_S=np.ones(len(bins), dtype=np.int64),
        blocks_S=np.ones(len(bins), dtype=np.int64),
        slowness_RP=np.ones((groups, job.pipeline_stages)),
        exchange_2SC=np.zeros_like(row_2XC),
        layers=None,
    )
    start = balanced(row_2XC.sum(axis=(0, 2)), [1] * len(bins), of_groups.job, len(bins))
    step_ms = row_2XC.sum() / (groups * job.pipeline_stages)
    placement = searched(
        start,
        of_groups,
        row_2XC,
        cap_tokens=1,
        plan_ms=problem.plan_settings.plan_ms or SHARE_OF_STEP * rounded_ms(step_ms),
    )
    falls = job.pipeline_stages == 1
    heights_ms = rows.heights_X
    samples: list[tuple[tuple[int, ...], ...]] = []
    for group, positions in enumerate(placement):
        ordered = [row for (row,) in positions]
        if falls:
            ordered.sort(key=lambda row: (-heights_ms[row], row))
        fastest_W = np.argsort(
            costs.slowness_R[group * job.lockstep_ranks :][: job.lockstep_ranks], kind="stable"
        )
        members = [_by_member(rows, bins, row, fastest_W) for row in ordered]
        samples += zip(*members, strict=True)
    return Arrangement.of_groups(tuple(samples))


def _by_member(
    rows: Rows, bins: list[tuple[tuple[int, ...], ...]], row: int, fastest_W: np.ndarray
) -> list[tuple[int, ...]]:
    """The bins of a row by member: the fullest on the fastest device."""
    load_W = rows.load_J[row * len(fastest_W) :][: len(fastest_W)]
    members: list[tuple[int, ...]] = [()] * len(fastest_W)
    for member, fullest in zip(
        fastest_W.tolist(), np.argsort(-load_W, kind="stable").tolist(), strict=True
    ):
        members[member] = bins[row][fullest]
    return members
