# SPDX-License-Identifier: Apache-2.0
"""Micro-batches in segments: where they run, how they are cut, and their budgets.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks, P pipeline stages,
Q price levels, U segments.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement, Placement
from sparsebalance_megatron.plan.bounds.step_bounds import step_bounds
from sparsebalance_megatron.plan.budgets.policy import TunedBudgets, tuned_budgets
from sparsebalance_megatron.plan.budgets.price import Pricing, price
from sparsebalance_megatron.plan.budgets.units import unit_growth_JCQ
from sparsebalance_megatron.plan.metrics import rounded_ms, stage_busy_ms
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms
from sparsebalance_megatron.plan.plan_error import PlanError
from sparsebalance_megatron.plan.segments.cuts import cut_at
from sparsebalance_megatron.plan.segments.lockstep import lockstep_segments_2UP
from sparsebalance_megatron.plan.segments.search import SegmentSearch
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_problem import StepProblem

_BALANCING_ROUNDS = 3
"""Rounds in which budgets follow from what pipelines take beside their busiest stage."""
_TIME_HALVINGS = 20


@dataclass(frozen=True, kw_only=True)
class SegmentedStep:
    """A placement with its cuts, its budgets, and the ms until the last rank ends."""

    arrangement: Arrangement
    tuned: TunedBudgets
    makespan_ms: float


def best_segments(problem: StepProblem, one_piece: Placement) -> SegmentedStep | None:
    """The shortest step found whose micro-batches pass the pipeline in segments.

    Samples are placed and cut at budgets between those expected and the least allowed, since ranks
    that the step waits for end below what is expected of all.

    Args:
        one_piece: the step's placement without segments. Its fullest rank holds at least as many
            tokens on its first stage as any rank with segments.

    Returns:
        None where no micro-batch is worth cutting, or every cut that was tried holds too many
        tokens.
    """
    floor_LS = problem.budgets.allowed.floor_LS
    search_LS = (problem.expected_LS + floor_LS) // 2
    try:
        start = problem.balanced_by(search_LS)
    except PlanError:
        start = one_piece
    search = SegmentSearch(problem, search_LS, _tokens_of_one_piece(problem, one_piece))
    arrangement, search_ms = search.best(start)
    is_cut = any(len(blocks) > 1 for rank in arrangement.first_blocks for blocks in rank)
    if not is_cut or not np.isfinite(search_ms):
        return None
    tuned_LS = _balanced_over_stages(problem, arrangement)
    _, step_ms_R, _ = segmented_times(problem.costs, arrangement, tuned_LS)
    slowest = np.repeat(step_ms_R == step_ms_R.max(), problem.job.micro_batches)
    return SegmentedStep(
        arrangement=arrangement,
        tuned=tuned_budgets(
            problem.budgets,
            tuned_LS,
            problem.budgets.stuck_S(tuned_LS) & slowest[arrangement.micro_batch_of_S],
        ),
        makespan_ms=float(step_ms_R.max()),
    )


def one_piece_bound_ms(problem: StepProblem) -> float:
    """Lower bound of a step without cuts, over all allowed budgets."""
    costs = problem.costs
    floor_2SC = costs.sample_ms(problem.budgets.allowed.floor_LS)
    return step_bounds(floor_2SC, costs).bound_ms * float(costs.slowness_RP.min())


def _tokens_of_one_piece(problem: StepProblem, placement: Placement) -> int:
    """Tokens that 1F1B holds on the first stage of the fullest rank."""
    lengths = problem.lengths_tokens
    stages, most = problem.job.pipeline_stages, 0
    for rank in placement:
        tokens = [sum(lengths[sample] for sample in micro_batch) for micro_batch in rank]
        most = max(most, *(sum(tokens[m : m + stages]) for m in range(len(tokens))))
    return most


def segmented_times(
    costs: StepCosts, where: Arrangement, budgets_LS: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """[2, R, P, 1, M] ms of every micro-batch, all its segments together, [R] makespans, and
    [2, U, P] ms of the segments of all ranks, one after another.

    In lockstep groups, makespans and ms of segments are the group's, those of micro-batches each
    rank's by itself.
    """
    micro_batches, first_blocks = (
        list(itertools.chain.from_iterable(of)) for of in (where.samples, where.first_blocks)
    )
    cuts = cut_at(costs, budgets_LS, micro_batches, first_blocks)
    ms_2UP = np.stack(
        [np.concatenate(of) for of in ([c.forward_UP for c in cuts], [c.backward_UP for c in cuts])]
    )
    segments_RM = [list(map(len, of_rank)) for of_rank in where.first_blocks]
    ms_2UP *= np.repeat(costs.slowness_RP, list(map(sum, segments_RM)), axis=0)
    first_J = [0, *itertools.accumulate(len(cut.tokens_U) for cut in cuts[:-1])]
    ms_2JP = np.add.reduceat(ms_2UP, first_J, axis=1)
    times_2RPM = ms_2JP.reshape(2, *where.cp_sizes_RM.shape, -1).swapaxes(2, 3)
    if costs.job.lockstep_ranks > 1:
        ms_2UP = lockstep_segments_2UP(costs, where, budgets_LS)
    return (
        times_2RPM[:, :, :, None],
        makespans_ms(OperationTimes.of_segments(segments_RM, ms_2UP)),
        ms_2UP,
    )


def _balanced_over_stages(problem: StepProblem, where: Arrangement) -> np.ndarray:
    """Budgets that make the step short at the wanted coverage.

    In a full pipeline a rank takes what its busiest stage does, and a little for filling and
    emptying it. So all samples of a rank have one price level on each stage: the highest at which
    the stage ends with the step. Which step time that takes follows from sums over stages, and what
    filling and emptying take from simulating the budgets; both are repeated a few times.
    """
    pricing = problem.pricing or price(problem.budgets)
    budgets, allowed, costs = problem.budgets, problem.budgets.allowed, problem.costs
    if (allowed.floor_LS == allowed.top_LS).all():
        return allowed.base_LS
    stages = _StageLevels.of(problem, where, pricing)
    wanted = min(pricing.wanted_coverage, budgets.covered(pricing.expected_LS))
    found = []
    tuned_LS = pricing.expected_LS
    for _ in range(_BALANCING_ROUNDS):
        times_2RPVM, ms_R, _ = segmented_times(costs, where, tuned_LS)
        if budgets.covers(tuned_LS, wanted):
            found.append((rounded_ms(ms_R.max()), tuned_LS))
        beside_R = ms_R - stage_busy_ms(times_2RPVM).max(axis=1)
        tuned_LS = stages.budgets_LS(beside_R, wanted)
    if budgets.covers(allowed.base_LS, wanted):
        _, ms_R, _ = segmented_times(costs, where, allowed.base_LS)
        found.append((rounded_ms(ms_R.max()), allowed.base_LS))
    return min(found, key=lambda each: each[0])[1] if found else pricing.expected_LS


@dataclass(frozen=True, kw_only=True)
class _StageLevels:
    """Price levels of ranks and stages, with what they take and cover.

    ``busy_RPQ``: ms of a rank's work on a stage; ``covered_RPQ``: coverage by weight, summed over
    layers and samples.
    """

    pricing: Pricing
    stage_of_L: np.ndarray
    rank_of_S: np.ndarray
    busy_RPQ: np.ndarray
    covered_RPQ: np.ndarray

    @classmethod
    def of(cls, problem: StepProblem, where: Arrangement, pricing: Pricing) -> _StageLevels:
        costs, budgets, job = problem.costs, problem.budgets, problem.job
        ladder, stages = pricing.ladder, job.pipeline_stages
        micro_batch_of_S = where.micro_batch_of_S
        rank_of_S = micro_batch_of_S // job.micro_batches
        growth_JPQ = unit_growth_JCQ(costs, ladder, micro_batch_of_S)
        floor_2RPVM, _, _ = segmented_times(costs, where, ladder.common_LS(0))
        growth_RPQ = growth_JPQ.reshape(job.data_parallel_size, -1, *growth_JPQ.shape[1:]).sum(1)
        pair_ms_RP = costs.pair_ms_C * costs.segments.slowness * costs.slowness_RP
        covered_RPQ = np.zeros_like(growth_RPQ)
        weight_RZ = np.zeros((job.data_parallel_size, len(ladder.first_Z)))
        np.add.at(weight_RZ, (rank_of_S, ladder.size_S), budgets.weight_S)
        for stage in range(stages):
            of_stage_ZQ = ladder.coverage_ZLQ[:, costs.chunk_of_layer_L == stage].sum(axis=1)
            covered_RPQ[:, stage] = (weight_RZ[..., None] * of_stage_ZQ).sum(axis=1)
        return cls(
            pricing=pricing,
            stage_of_L=costs.chunk_of_layer_L,
            rank_of_S=rank_of_S,
            busy_RPQ=stage_busy_ms(floor_2RPVM)[..., None] + growth_RPQ * pair_ms_RP[..., None],
            covered_RPQ=covered_RPQ,
        )

    def budgets_LS(self, beside_R: np.ndarray, wanted_coverage: float) -> np.ndarray:
        """The budgets of the shortest step that covers what is wanted, and not much more: stages
        that are less busy let a pipeline end earlier. Where nothing is wanted, the most coverage in
        the time that the floors take.

        Args:
            beside_R: ms that a rank takes beside its busiest stage.
        """
        end_RPQ = self.busy_RPQ + beside_R[:, None, None]
        least_RP = end_RPQ[..., 0]
        low_ms = float(least_RP.min() if np.isfinite(wanted_coverage) else least_RP.max())
        high_ms = float(end_RPQ.max())

        def levels_RP(end_ms: float) -> np.ndarray:
            return np.maximum((end_RPQ <= end_ms).sum(axis=2) - 1, 0)

        def covers(end_ms: float) -> bool:
            level_RP1 = levels_RP(end_ms)[..., None]
            covered = np.take_along_axis(self.covered_RPQ, level_RP1, axis=2).sum()
            return bool(covered >= wanted_coverage)

        if covers(low_ms):
            high_ms = low_ms
        for _ in range(_TIME_HALVINGS if high_ms > low_ms else 0):
            middle_ms = (low_ms + high_ms) / 2
            low_ms, high_ms = (low_ms, middle_ms) if covers(middle_ms) else (middle_ms, high_ms)
        level_RL = levels_RP(high_ms)[:, self.stage_of_L]
        return self.pricing.ladder.budgets_LS(level_RL[self.rank_of_S].T)
