# SPDX-License-Identifier: Apache-2.0
"""Budgets of placed and cut micro-batches: one price level for a rank on each stage.

Shape legend: S samples of a global batch, L layers, R data-parallel ranks, P pipeline stages,
Q price levels, E groups of ranks, J = R x M micro-batches, Z sizes of samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.price import Pricing, price
from sparsebalance_megatron.plan.budgets.units import unit_growth_JCQ
from sparsebalance_megatron.plan.context_groups import first_places
from sparsebalance_megatron.plan.metrics import rounded_ms, stage_busy_ms
from sparsebalance_megatron.plan.segments.segmented_times import segmented_times
from sparsebalance_megatron.plan.step_problem import StepProblem

_BALANCING_ROUNDS = 3
"""Rounds in which budgets follow from what pipelines take beside their busiest stage."""
_TIME_HALVINGS = 20


def balanced_over_stages(problem: StepProblem, where: Arrangement) -> tuple[np.ndarray, np.ndarray]:
    """Budgets [L, S] that make the step short at the wanted coverage, and makespans [R].

    In a full pipeline a rank takes what its busiest stage does, and a little for filling and
    emptying it. So all samples of a rank have one price level on each stage: the highest at which
    the stage ends with the step. Which step time that takes follows from sums over stages, and what
    filling and emptying take from simulating the budgets; both are repeated a few times.
    """
    pricing = problem.pricing or price(problem.budgets)
    budgets, allowed, costs = problem.budgets, problem.budgets.allowed, problem.costs
    if (allowed.floor_LS == allowed.top_LS).all():
        return allowed.base_LS, segmented_times(costs, where, allowed.base_LS)[1]
    stages = _StageLevels.of(problem, where, pricing)
    wanted = min(pricing.wanted_coverage, budgets.covered(pricing.expected_LS))
    base_ms_R = segmented_times(costs, where, allowed.base_LS)[1]
    least_ms = float(base_ms_R.mean()) if problem.budget_policy.cuts_what_waits else 0.0
    found: list[tuple[np.ndarray, np.ndarray]] = []
    tuned_LS = pricing.expected_LS
    for _ in range(_BALANCING_ROUNDS):
        times_2RPVM, ms_R, _ = segmented_times(costs, where, tuned_LS)
        found.append((tuned_LS, ms_R))
        beside_R = ms_R - stage_busy_ms(times_2RPVM).max(axis=1)
        tuned_LS = stages.budgets_LS(beside_R, wanted, least_ms)
    found.append((allowed.base_LS, base_ms_R))
    covering = [each for each in found if budgets.covers(each[0], wanted)]
    return min(covering or found[:1], key=lambda each: rounded_ms(each[1].max()))


@dataclass(frozen=True, kw_only=True)
class _StageLevels:
    """Price levels of ranks and stages, with what they take and cover.

    ``ranks_ER``: which ranks every group of ranks that share samples has, one rank where it is
    alone. Samples have the lowest level of their ranks. ``busy_RPQ``: ms of a rank's work on a
    stage; ``covered_EPQ``: coverage by weight, summed over layers and a group's samples.
    """

    pricing: Pricing
    stage_of_L: np.ndarray
    group_of_S: np.ndarray
    ranks_ER: np.ndarray
    busy_RPQ: np.ndarray
    covered_EPQ: np.ndarray

    @classmethod
    def of(cls, problem: StepProblem, where: Arrangement, pricing: Pricing) -> _StageLevels:
        costs, budgets, job = problem.costs, problem.budgets, problem.job
        ladder, stages = pricing.ladder, job.pipeline_stages
        micro_batch_of_S = where.micro_batch_of_S
        first_J, cp_size_J = first_places(where.cp_sizes_RM), where.cp_sizes_RM.reshape(-1)
        keys_S2 = np.stack(
            [micro_batch_of_S // job.micro_batches, cp_size_J[micro_batch_of_S]], axis=1
        )
        groups_E2, group_of_S = np.unique(keys_S2, axis=0, return_inverse=True)
        first_E1, cp_size_E1 = np.hsplit(groups_E2, 2)
        after_ER = np.arange(job.data_parallel_size) - first_E1
        growth_JPQ = unit_growth_JCQ(costs, ladder, micro_batch_of_S)
        floor_2RPVM, _, _ = segmented_times(costs, where, ladder.common_LS(0))
        growth_JPQ = growth_JPQ[first_J] * costs.share_W[cp_size_J][:, None, None]
        growth_RPQ = growth_JPQ.reshape(job.data_parallel_size, -1, *growth_JPQ.shape[1:]).sum(1)
        pair_ms_RP = costs.pair_ms_C * costs.segments.slowness * costs.slowness_RP
        covered_EPQ = np.zeros((len(groups_E2), *growth_RPQ.shape[1:]))
        weight_EZ = np.zeros((len(groups_E2), len(ladder.first_Z)))
        np.add.at(weight_EZ, (group_of_S, ladder.size_S), budgets.weight_S)
        for stage in range(stages):
            of_stage_ZQ = ladder.coverage_ZLQ[:, costs.chunk_of_layer_L == stage].sum(axis=1)
            covered_EPQ[:, stage] = (weight_EZ[..., None] * of_stage_ZQ).sum(axis=1)
        return cls(
            pricing=pricing,
            stage_of_L=costs.chunk_of_layer_L,
            group_of_S=group_of_S,
            ranks_ER=(after_ER >= 0) & (after_ER < cp_size_E1),
            busy_RPQ=stage_busy_ms(floor_2RPVM)[..., None] + growth_RPQ * pair_ms_RP[..., None],
            covered_EPQ=covered_EPQ,
        )

    def budgets_LS(
        self, beside_R: np.ndarray, wanted_coverage: float, least_ms: float
    ) -> np.ndarray:
        """The budgets of the shortest step that covers what is wanted, and not much more: stages
        that are less busy let a pipeline end earlier. Where nothing is wanted, the most coverage in
        the time that the floors take.

        Args:
            beside_R: ms that a rank takes beside its busiest stage.
            least_ms: that the step is to take, whatever covers what is wanted in less.
        """
        end_RPQ = self.busy_RPQ + beside_R[:, None, None]
        least_RP = end_RPQ[..., 0]
        low_ms = float(least_RP.min() if np.isfinite(wanted_coverage) else least_RP.max())
        low_ms, high_ms = max(low_ms, least_ms), max(float(end_RPQ.max()), least_ms)

        def levels_EP(end_ms: float) -> np.ndarray:
            level_RP = np.maximum((end_RPQ <= end_ms).sum(axis=2) - 1, 0)
            levels_ERP = np.where(self.ranks_ER[..., None], level_RP, end_RPQ.shape[2])
            return np.asarray(levels_ERP.min(axis=1))

        def covers(end_ms: float) -> bool:
            level_EP1 = levels_EP(end_ms)[..., None]
            covered = np.take_along_axis(self.covered_EPQ, level_EP1, axis=2).sum()
            return bool(covered >= wanted_coverage)

        if covers(low_ms):
            high_ms = low_ms
        for _ in range(_TIME_HALVINGS if high_ms > low_ms else 0):
            middle_ms = (low_ms + high_ms) / 2
            low_ms, high_ms = (low_ms, middle_ms) if covers(middle_ms) else (middle_ms, high_ms)
        level_EL = levels_EP(high_ms)[:, self.stage_of_L]
        return self.pricing.ladder.budgets_LS(level_EL[self.group_of_S].T)
