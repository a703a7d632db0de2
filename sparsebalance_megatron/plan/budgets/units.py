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

Shape legend: I heights, X = E x M rows, Y segments of all ranks.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from sparsebalance_megatron.plan.arrangement import Arrangement
from sparsebalance_megatron.plan.budgets.pipelines import Pipelines
from sparsebalance_megatron.plan.budgets.price import (
    LEVELS,
    BudgetSteps,
    Ladder,
    budgets_by_level,
    envelope_slopes,
)
from sparsebalance_megatron.plan.groups import Groups
from sparsebalance_megatron.plan.search_effort import SEGMENT_COST, WAITING_COST, SearchEffort
from sparsebalance_megatron.plan.segments import PlacedSegments
from sparsebalance_megatron.plan.step_problem import ROUNDING, StepProblem

_HEIGHTS = 32
"""Heights of a layer that are tried."""
_MEMBER_LEVELS = slice(0, None, 4)
"""Price levels of the ladder that members of a row may have, of 0 to LEVELS."""
_LEAST_LEVELS_OF_SEGMENTS = 8
"""Price levels of units whose micro-batches pass in segments, where effort pays for no more."""
_LEAST_MS = 1e-12
_AT_ONCE = 256
"""Samples whose levels fit a core's cache."""

BudgetsOfLevels = Callable[[np.ndarray], np.ndarray]
"""Budgets [L, S] at levels [J, C] of all units."""


def units_of(
    problem: StepProblem, where: Arrangement, effort: SearchEffort
) -> tuple[Pipelines, BudgetsOfLevels]:
    """The units of placed samples, and the budgets that their levels mean.

    Where micro-batches pass in segments, cutting them at each level takes effort: there are as many
    levels as a third of it pays for.
    """
    ladder, job, place_S = Ladder.of(problem), problem.job, where.micro_batch_of_S
    if job.lockstep_ranks > 1:
        growth_JCQ, budgets_LS = _rows(problem, ladder, where)
        row_J = np.arange(len(growth_JCQ))
    else:
        chunks = job.pipeline_stages * job.virtual_stages
        unit_LS = place_S * chunks + job.chunk_of_layer_L[:, None]

        def budgets_LS(level_JC: np.ndarray) -> np.ndarray:
            return ladder.budgets_LS(level_JC.ravel()[unit_LS])

    if where.segment_starts_blocks:
        return _in_segments(problem, where, budgets_LS, effort)
    if job.lockstep_ranks == 1:
        growth_JCQ, row_J = _micro_batches(problem, ladder, where)
    return _in_one_piece(problem, where, growth_JCQ, row_J), budgets_LS


def _in_one_piece(
    problem: StepProblem, where: Arrangement, growth_NCQ: np.ndarray, row_J: np.ndarray
) -> Pipelines:
    """Pipelines whose units grow by these forward and backward ms. A lockstep group is one rank."""
    costs, times = problem.costs, problem.micro_batch_ms(problem.allowed.floor_LS, where)
    floor_2RMPV = np.moveaxis(times.by_micro_batch_2RPVM, -1, 2)
    return Pipelines(
        times=times,
        growth_KNCQ=growth_NCQ[None],
        row_Y=row_J[Groups(times.cp_sizes_RM).first_J],
        share_2C=costs.pair_2C / np.maximum(costs.pair_ms_C, _LEAST_MS),
        floor_2YC=floor_2RMPV.reshape(2, len(row_J), costs.chunks),
        cp_sizes_RM=times.cp_sizes_RM,
        segments_J=np.ones(len(row_J), dtype=np.int64),
        operation_cost=WAITING_COST if times.cp_sizes_RM.max() > 1 else 1,
    )


def _in_segments(
    problem: StepProblem, where: Arrangement, budgets_LS: BudgetsOfLevels, effort: SearchEffort
) -> tuple[Pipelines, BudgetsOfLevels]:
    """Pipelines in segments, whose operations are priced with all units at one level."""
    job, placed = problem.job, PlacedSegments(problem.costs, where)
    segments_J = np.concatenate(placed.segments_EM)
    each = SEGMENT_COST * 2 * job.pipeline_stages * int(segments_J.sum()) * job.lockstep_ranks
    levels = LEVELS
    while levels > max(_LEAST_LEVELS_OF_SEGMENTS, effort.affordable(3 * each)):
        levels //= 2
    effort.spend(levels * each)
    stride = LEVELS // levels
    every_level = range(0, LEVELS + 1, stride)
    shape_JC = len(segments_J), job.pipeline_stages
    budgets_QLS = np.stack([budgets_LS(np.full(shape_JC, level)) for level in every_level])
    # Of layers' columns and many members, a few levels at a time.
    some_levels = np.array_split(budgets_QLS, job.lockstep_ranks)
    ms_Q2UP = np.concatenate([placed.ms(some) for some in some_levels if len(some)])
    ms_2UPQ = np.ascontiguousarray(np.moveaxis(ms_Q2UP, 0, -1))
    pipelines = Pipelines(
        times=placed.times(ms_2UPQ[..., 0]),
        growth_KNCQ=ms_2UPQ,
        row_Y=np.arange(ms_2UPQ.shape[1]),
        share_2C=np.ones(ms_2UPQ.shape[::2]),
        floor_2YC=np.zeros(ms_2UPQ.shape[:3]),
        cp_sizes_RM=placed.cp_sizes_EM,
        segments_J=segments_J,
        operation_cost=SEGMENT_COST,
    )
    return pipelines, lambda level_JC: budgets_LS(stride * level_JC)


def _micro_batches(
    problem: StepProblem, ladder: Ladder, where: Arrangement
) -> tuple[np.ndarray, np.ndarray]:
    """Ms [N, C, Q] that levels add to every chunk of the micro-batches that any level raises, on
    each of their ranks, after a row of zeros for all others, and the row of each micro-batch."""
    costs, place_S = problem.costs, where.micro_batch_of_S
    pair_ms_SC = costs.share_W[where.cp_size_S][:, None] * costs.pair_ms_C
    rank_S = place_S // costs.job.micro_batches
    pair_ms_SC *= costs.slowness(where.cp_size_S, rank_S, costs.chunk_of_X)
    rises_J = np.bincount(place_S, ladder.rises_S, costs.job.places) > 0
    row_J = np.cumsum(rises_J) * rises_J
    rows = int(rises_J.sum()) + 1
    return _growth_NXQ(problem, ladder, row_J[place_S], rows, pair_ms_SC), row_J


def _rows(
    problem: StepProblem, ladder: Ladder, where: Arrangement
) -> tuple[np.ndarray, BudgetsOfLevels]:
    """Ms that levels add to every chunk of rows, on each rank of a group, and budgets."""
    costs, job, place_S = problem.costs, problem.costs.job, where.micro_batch_of_S
    ladder = replace(ladder, budgets_QLZ=ladder.budgets_QLZ[_MEMBER_LEVELS])
    layer_L1 = np.arange(job.layers)[:, None]
    place_XW = job.place_EMW.reshape(-1, job.lockstep_ranks)

    def by_row_XLWQ(values_JLQ: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(values_JLQ[place_XW].swapaxes(1, 2))

    floor_2SX = costs.at_cp_size(costs.sample_ms(problem.allowed.floor_LS), where.cp_size_S)
    floor_SL = floor_2SX[..., : job.layers].sum(axis=0)
    pair_ms_SL = costs.share_W[where.cp_size_S][:, None] * costs.pair_ms_L
    ms_JLQ = _growth_NXQ(problem, ladder, place_S, job.places, pair_ms_SL)
    ms_JLQ += _sums_J(floor_SL, place_S, job.places)[..., None]
    slowness_RL = costs.slowness_RP[:, costs.chunk_of_layer_L // job.virtual_stages]
    ms_JLQ *= np.repeat(slowness_RL, job.micro_batches, axis=0)[..., None]
    ms_XLWQ = by_row_XLWQ(ms_JLQ)
    # 0 where the curve is not known.
    covered_QLZ = problem.coverage.coverage_LS(ladder.blocks_Z, ladder.budgets_QLZ)
    covered_SLQ = np.nan_to_num(covered_QLZ).T[ladder.size_S]
    covered_XLWQ = by_row_XLWQ(_sums_J(covered_SLQ, place_S, job.places))

    low_XL = ms_XLWQ[..., 0].max(axis=2)
    high_XL = np.maximum(ms_XLWQ[..., -1].max(axis=2), low_XL * ROUNDING)
    growth_XL1 = (high_XL / np.maximum(low_XL, _LEAST_MS))[..., None]
    tried_XLI = low_XL[..., None] * growth_XL1 ** (np.arange(_HEIGHTS) / (_HEIGHTS - 1))
    # The last level within each height: level 0 always is.
    limit_XL1I = tried_XLI[:, :, None] * ROUNDING
    within_XLWI = np.zeros((*ms_XLWQ.shape[:3], _HEIGHTS), dtype=np.int8)
    for ms_XLW in np.moveaxis(ms_XLWQ[..., 1:], -1, 0):
        within_XLWI += ms_XLW[..., None] <= limit_XL1I
    member_XLWI = within_XLWI.astype(np.int64)
    reached_XLI = np.take_along_axis(ms_XLWQ, member_XLWI, axis=3).max(axis=2)
    covered_XLI = np.take_along_axis(covered_XLWQ, member_XLWI, axis=3).sum(axis=2)
    more_ms, more_coverage = np.diff(reached_XLI), np.diff(covered_XLI)
    steps = BudgetSteps(
        low_LS=np.zeros(low_XL.shape, dtype=np.int64),
        points_LSK=np.broadcast_to(np.arange(1, _HEIGHTS), more_ms.shape),
        pairs_LSK=more_ms,
        slope_LSK=envelope_slopes(more_coverage, more_ms, more_ms > 0.0),
    )
    height_QXL = budgets_by_level(steps)
    ms_XLQ = np.take_along_axis(reached_XLI, np.moveaxis(height_QXL, 0, -1), axis=2)
    growth_XCQ = np.zeros((len(ms_XLQ), costs.chunks, LEVELS + 1))
    for layer, chunk in enumerate(costs.chunk_of_layer_L.tolist()):
        growth_XCQ[:, chunk] += ms_XLQ[:, layer] - ms_XLQ[:, layer, :1]

    row_S, member_S = np.divmod(np.argsort(place_XW.reshape(-1))[place_S], job.lockstep_ranks)

    def budgets_LS(level_XC: np.ndarray) -> np.ndarray:
        level_LS = level_XC[row_S][:, costs.chunk_of_layer_L].T
        height_LS = height_QXL[level_LS, row_S, layer_L1]
        return ladder.budgets_LS(member_XLWI[row_S, layer_L1, member_S, height_LS])

    return growth_XCQ, budgets_LS


def _growth_NXQ(
    problem: StepProblem, ladder: Ladder, row_S: np.ndarray, rows: int, pair_ms_SX: np.ndarray
) -> np.ndarray:
    """Ms that levels add to micro-batches in every column that has layers.

    They are ``sum_S pair_ms_S (length_S a_S - b_S)``, where a and b are the sums over the layers of
    the terms of :meth:`.WorkModel.growth`.

    Args:
        row_S: of the micro-batch of every sample.
    """
    costs, budgets_QLZ, columns = problem.costs, ladder.budgets_QLZ, pair_ms_SX.shape[1]
    layers_XL = costs.column_of_L == np.arange(columns)[:, None]
    length_S1 = costs.length_blocks_S[:, None]
    growth_NXQ = np.zeros((rows, columns, len(budgets_QLZ)))
    parts = _apart(row_S, np.flatnonzero(ladder.rises_S))
    for column, layers_L in enumerate(layers_XL):
        terms = costs.work.growth(budgets_QLZ[:, layers_L])
        a_ZQ, b_ZQ = (term_QLZ.sum(axis=1, dtype=np.float64).T for term_QLZ in terms)
        # Rows of sizes are taken whole, which is several times as fast as single entries.
        a_ZQ, b_ZQ = (np.ascontiguousarray(each_ZQ - each_ZQ[:, :1]) for each_ZQ in (a_ZQ, b_ZQ))
        growth_NQ = growth_NXQ[:, column]
        for some in parts:
            size = ladder.size_S[some]
            growth = length_S1[some] * a_ZQ.take(size, axis=0)
            growth -= b_ZQ.take(size, axis=0)
            growth *= pair_ms_SX[some, column, None]
            growth_NQ[row_S[some]] += growth
    return growth_NXQ


def _sums_J(values_S: np.ndarray, place_S: np.ndarray, places: int) -> np.ndarray:
    """Sums [J, ...] over the samples of micro-batches."""
    sums_J = np.zeros((places, *values_S.shape[1:]))
    for some in _apart(place_S, np.arange(len(place_S))):
        sums_J[place_S[some]] += values_S[some]
    return sums_J


def _apart(row_S: np.ndarray, sample_I: np.ndarray) -> list[np.ndarray]:
    """Samples in parts that each have at most one of a row, and fit a core's cache with their
    levels; adding them part by part is several times as fast as numpy.add.at."""
    sample_I = sample_I[np.argsort(row_S[sample_I], kind="stable")]
    row_I = row_S[sample_I]
    number_I = np.arange(len(row_I)) - np.searchsorted(row_I, row_I)
    sample_I = sample_I[np.argsort(number_I, kind="stable")]
    ends = np.cumsum(np.bincount(number_I))
    return [
        part[first : first + _AT_ONCE]
        for part in np.split(sample_I, ends[:-1])
        for first in range(0, len(part), _AT_ONCE)
    ]
