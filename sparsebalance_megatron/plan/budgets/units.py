# SPDX-License-Identifier: Apache-2.0
"""Units whose budgets rise by price levels until a step is full: of micro-batches, or of rows.

Where ranks wait for nobody, a unit is one chunk of one micro-batch, and a level is a price of
coverage in ms. Where the ranks of a lockstep group wait for one another in every layer, a unit is
one chunk of a row (the micro-batches of a group at one position), and its budgets follow the
*heights* of its layers:

1. The height of a layer is what its slowest member takes. Every member takes the most attention
   that ends within the height, so what does not stick out rises at no cost in time.
2. Heights are tried from the highest floor of the members to the time of all their attention. The
   envelope of coverage over height gives every step from height to height a slope.
3. A level takes the steps whose slopes are at least its price, as levels of micro-batches do.

Shape legend: Q price levels, I heights, Z sizes (samples of as many blocks), E groups, W ranks of a
group, X = E x M rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.fill import Pipelines
from sparsebalance_megatron.plan.budgets.pipelines import PipelinesInOnePiece, PipelinesInSegments
from sparsebalance_megatron.plan.budgets.price import (
    LEVELS,
    BudgetSteps,
    Ladder,
    budgets_by_level,
    envelope_slopes,
)
from sparsebalance_megatron.plan.budgets.problem import ROUNDING, BudgetProblem
from sparsebalance_megatron.plan.context_groups import unshared
from sparsebalance_megatron.plan.lockstep_times import group_times, layers_of
from sparsebalance_megatron.plan.pipeline.operation_times import OperationTimes
from sparsebalance_megatron.plan.step_costs import PAIRS, StepCosts

_HEIGHTS = 32
"""Heights of a layer that are tried."""
_MEMBER_LEVELS = slice(0, None, 4)
"""Price levels of the ladder that members of a row may have, of 0 to LEVELS."""
_LEVELS_OF_SEGMENTS = 32
"""Price levels of units whose micro-batches pass in segments, of 1 to LEVELS."""
_LEAST_MS = 1e-12


@dataclass(frozen=True, kw_only=True)
class Units:
    """Units of pipelines, and the budgets that their levels mean, [J, C] -> [L, S]."""

    pipelines: Pipelines
    budgets_LS: Callable[[np.ndarray], np.ndarray]


def units_of(problem: BudgetProblem, where: Arrangement) -> Units:
    """The units of placed samples."""
    costs, ladder = problem.costs, Ladder.of(problem)
    if costs.job.lockstep_ranks > 1:
        heights = _Heights.over(problem, ladder, where)
        units = Units(
            pipelines=heights.pipelines(problem, where),
            budgets_LS=lambda level_XC: ladder.budgets_LS(heights.levels_LS(level_XC)),
        )
    else:
        units = _micro_batch_units(problem, ladder, where)
    if not where.segment_starts_blocks:
        return units
    shape_JC, stride = units.pipelines.shape_JC, LEVELS // _LEVELS_OF_SEGMENTS
    return Units(
        pipelines=PipelinesInSegments.of(
            costs,
            where,
            [units.budgets_LS(np.full(shape_JC, level)) for level in range(0, LEVELS + 1, stride)],
        ),
        budgets_LS=lambda level_JC: units.budgets_LS(stride * level_JC),
    )


def _micro_batch_units(problem: BudgetProblem, ladder: Ladder, where: Arrangement) -> Units:
    costs, place_S = problem.costs, where.micro_batch_of_S
    unit_LS = place_S * costs.chunks + costs.chunk_of_layer_L[:, None]
    layers_CL = costs.chunk_of_layer_L == np.arange(costs.chunks)[:, None]
    whole = replace(where, segment_starts_blocks=())
    return Units(
        pipelines=PipelinesInOnePiece(
            costs=costs,
            floor_times=problem.micro_batch_ms(problem.allowed.floor_LS, whole),
            growth_JCQ=_growth_JXQ(costs, ladder, place_S, layers_CL),
        ),
        budgets_LS=lambda level_JC: ladder.budgets_LS(level_JC.ravel()[unit_LS]),
    )


def _growth_JXQ(
    costs: StepCosts,
    ladder: Ladder,
    micro_batch_of_S: np.ndarray,
    layers_XL: np.ndarray,
    levels: slice = slice(None),
    share_S: np.ndarray | None = None,
) -> np.ndarray:
    """Block pairs that micro-batches add in sets of layers at some price levels: a share of each
    sample's where one is given.

    They are ``sum_S (length_S a_S - b_S)``, where a and b are the sums over the layers of the terms
    of :meth:`.WorkModel.growth`.
    """
    order_S = np.argsort(micro_batch_of_S, kind="stable")
    filled_J, first_J = np.unique(micro_batch_of_S[order_S], return_index=True)
    length_S1, size_S = costs.length_blocks_S[order_S, None], ladder.size_S[order_S]
    budgets_QLZ = ladder.budgets_QLZ[levels]
    growth_JXQ = np.zeros((costs.job.places, len(layers_XL), len(budgets_QLZ)))
    for column, layers_L in enumerate(layers_XL):
        terms = costs.work.growth(budgets_QLZ[:, layers_L])
        a_ZQ, b_ZQ = (term_QLZ.sum(axis=1).T for term_QLZ in terms)
        a_ZQ, b_ZQ = a_ZQ - a_ZQ[:, :1], b_ZQ - b_ZQ[:, :1]
        # Rows of sizes are taken whole, which is several times as fast as single entries.
        pairs_SQ = length_S1 * np.ascontiguousarray(a_ZQ)[size_S]
        pairs_SQ -= np.ascontiguousarray(b_ZQ)[size_S]
        if share_S is not None:
            pairs_SQ *= share_S[order_S, None]
        growth_JXQ[filled_J, column] = np.add.reduceat(pairs_SQ, first_J)
    return growth_JXQ


@dataclass(frozen=True, kw_only=True)
class _Heights:
    """Heights of every layer of every row by price level, and the levels of members within them.

    Attributes:
        chunk_of_layer_L: the chunk of each layer.
        ms_XLQ: height at each price level.
        height_XLQ: its number among the heights that were tried.
        member_XLWI: the level of every member's ladder within each height that was tried.
        row_S, member_S: of every sample.
    """

    chunk_of_layer_L: np.ndarray
    ms_XLQ: np.ndarray
    height_XLQ: np.ndarray
    member_XLWI: np.ndarray
    row_S: np.ndarray
    member_S: np.ndarray

    @classmethod
    def over(cls, problem: BudgetProblem, ladder: Ladder, where: Arrangement) -> _Heights:
        costs, job = problem.costs, problem.costs.job
        layers, place_S = layers_of(costs, where), where.micro_batch_of_S
        rank_S, position_S = np.divmod(place_S, job.micro_batches)
        group_S, member_S = np.divmod(rank_S, job.lockstep_ranks)
        row_S = group_S * job.micro_batches + position_S
        levels = len(range(LEVELS + 1)[_MEMBER_LEVELS])
        shape = -1, job.lockstep_ranks, job.micro_batches, job.layers, levels

        def by_row_XLWQ(values_JLQ: np.ndarray) -> np.ndarray:
            rows = values_JLQ.reshape(shape).transpose(0, 2, 3, 1, 4)
            return np.ascontiguousarray(rows).reshape(-1, *rows.shape[2:])

        pair_ms_L = layers.columns_2XF[:, : job.layers, PAIRS].sum(axis=0)
        floor_JL = np.zeros((job.places, job.layers))
        floor_2SX = layers.ms_2SX(costs.sparse_pairs_LS(ladder.budgets_QLZ[0][:, ladder.size_S]))
        np.add.at(floor_JL, place_S, floor_2SX[..., : job.layers].sum(axis=0))
        every_L = np.eye(job.layers, dtype=bool)
        ms_JLQ = _growth_JXQ(costs, ladder, place_S, every_L, _MEMBER_LEVELS, layers.pair_share_S)
        ms_JLQ *= pair_ms_L[:, None]
        ms_JLQ += floor_JL[..., None]
        slowness_RL = costs.slowness_RP[:, costs.chunk_of_layer_L // job.virtual_stages]
        ms_JLQ *= np.repeat(slowness_RL, job.micro_batches, axis=0)[..., None]
        ms_XLWQ = by_row_XLWQ(ms_JLQ)
        covered_XLWQ = by_row_XLWQ(_coverage_JLQ(problem, ladder, place_S))

        low_XL = ms_XLWQ[..., 0].max(axis=2)
        high_XL = np.maximum(ms_XLWQ[..., -1].max(axis=2), low_XL * ROUNDING)
        share_I = np.arange(_HEIGHTS) / (_HEIGHTS - 1)
        growth_XL1 = (high_XL / np.maximum(low_XL, _LEAST_MS))[..., None]
        tried_XLI = low_XL[..., None] * growth_XL1**share_I
        member_XLWI = _last_within(ms_XLWQ, tried_XLI * ROUNDING)
        reached_XLI = np.take_along_axis(ms_XLWQ, member_XLWI, axis=3).max(axis=2)
        covered_XLI = np.take_along_axis(covered_XLWQ, member_XLWI, axis=3).sum(axis=2)
        more_ms, more_coverage = np.diff(reached_XLI), np.diff(covered_XLI)
        steps = BudgetSteps(
            low_LS=np.zeros(low_XL.shape, dtype=np.int64),
            points_LSK=np.broadcast_to(np.arange(1, _HEIGHTS), more_ms.shape),
            pairs_LSK=more_ms,
            slope_LSK=envelope_slopes(more_coverage, more_ms, more_ms > 0.0),
        )
        height_XLQ = np.moveaxis(budgets_by_level(steps), 0, -1)
        return cls(
            chunk_of_layer_L=costs.chunk_of_layer_L,
            ms_XLQ=np.take_along_axis(reached_XLI, height_XLQ, axis=2),
            height_XLQ=height_XLQ,
            member_XLWI=member_XLWI,
            row_S=row_S,
            member_S=member_S,
        )

    def pipelines(self, problem: BudgetProblem, where: Arrangement) -> PipelinesInOnePiece:
        """The pipelines of the rows: a group is a rank there."""
        costs = problem.costs
        groups = costs.job.data_parallel_size // costs.job.lockstep_ranks
        job = replace(costs.job, data_parallel_size=groups, lockstep_ranks=1)
        floor = group_times(costs, problem.allowed.floor_LS, where)
        growth_XLQ = self.ms_XLQ - self.ms_XLQ[..., :1]
        growth_XCQ = np.zeros((job.places, costs.chunks, LEVELS + 1))
        for layer, chunk in enumerate(costs.chunk_of_layer_L.tolist()):
            growth_XCQ[:, chunk] += growth_XLQ[:, layer]
        growth_XCQ /= np.maximum(costs.pair_ms_C, _LEAST_MS)[:, None]
        return PipelinesInOnePiece(
            costs=replace(
                costs, job=job, layers=None, slowness_RP=np.ones((groups, job.pipeline_stages))
            ),
            floor_times=OperationTimes(
                graph=floor.graph,
                ms_OR=np.ascontiguousarray(floor.ms_OR[:, :: costs.job.lockstep_ranks]),
                cp_sizes_RM=unshared(groups, job.micro_batches),
            ),
            growth_JCQ=growth_XCQ,
        )

    def levels_LS(self, level_XC: np.ndarray) -> np.ndarray:
        """Ladder levels of every layer of every sample, at price levels of units."""
        layer_L = np.arange(len(self.chunk_of_layer_L))
        level_XL = level_XC[:, self.chunk_of_layer_L]
        height_XL = np.take_along_axis(self.height_XLQ, level_XL[..., None], axis=2)[..., 0]
        row_1S, member_1S, layer_L1 = self.row_S[None], self.member_S[None], layer_L[:, None]
        member_LS = self.member_XLWI[row_1S, layer_L1, member_1S, height_XL[row_1S, layer_L1]]
        return np.arange(LEVELS + 1)[_MEMBER_LEVELS][member_LS]


def _last_within(ms_XLWQ: np.ndarray, limits_XLI: np.ndarray) -> np.ndarray:
    """[X, L, W, I] the last level whose ms are within each limit; level 0 always is.

    All searches are one: ms and limits of a layer are moved where no other layer's are.
    """
    shape, levels = ms_XLWQ.shape[:3], ms_XLWQ.shape[3]
    far = 2.0 * max(float(ms_XLWQ.max()), float(limits_XLI.max()), _LEAST_MS)
    shift = far * np.arange(np.prod(shape), dtype=np.float64).reshape(*shape, 1)
    below = np.searchsorted(
        (ms_XLWQ + shift).ravel(), (limits_XLI[:, :, None] + shift).ravel(), side="right"
    ).reshape(*shape, -1)
    first = levels * np.arange(np.prod(shape)).reshape(*shape, 1)
    return np.asarray(np.clip(below - first - 1, 0, levels - 1))


def _coverage_JLQ(problem: BudgetProblem, ladder: Ladder, place_S: np.ndarray) -> np.ndarray:
    """Coverage, summed over the samples of micro-batches whose curves are known."""
    order_S = np.argsort(place_S, kind="stable")
    filled_J, first_J = np.unique(place_S[order_S], return_index=True)
    covered_SLQ = ladder.coverage_ZLQ[..., _MEMBER_LEVELS][ladder.size_S[order_S]]
    covered_JLQ = np.zeros((problem.costs.job.places, *covered_SLQ.shape[1:]))
    covered_JLQ[filled_J] = np.add.reduceat(covered_SLQ, first_J)
    return covered_JLQ
