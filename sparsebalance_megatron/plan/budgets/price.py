# SPDX-License-Identifier: Apache-2.0
"""Prices of coverage: the budgets of all layers and samples by one price.

A step of budgets leads from one grid budget to the next, with a price in ms and a gain in coverage.
Steps are ranked by gain per ms on the concave envelope of the curve, so that a ranking by gain
never asks for a later step before an earlier one. Samples of as many blocks have the same curves,
floors and prices, so the ladder is one of sizes; one whose budgets are pinned is a size of its own.

Shape legend: I sequences of steps (of a layer and sample or size).
"""

from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_costs import StepCosts
from sparsebalance_megatron.plan.step_problem import StepProblem

LEVELS = 128
_TIE_BREAK = 0.05
"""Slopes are scaled by 1 to 1 plus this. Layers whose curves are alike would otherwise rise
together, and a chunk's budgets could not fill what is left of a step."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_LEAST_MS = 1e-30
_NO_TIME = 1e-14


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Budgets by price level, 0 (the floors) to LEVELS (everything that gains coverage).

    ``size_S``: the size of every sample. ``blocks_Z``: its blocks.
    """

    size_S: np.ndarray
    blocks_Z: np.ndarray
    budgets_QLZ: np.ndarray

    @classmethod
    def of(cls, problem: StepProblem) -> "Ladder":
        """The ladder of a problem's samples.

        Prices are those of whole blocks; a ragged last block makes no difference to the ranking.
        """
        costs, allowed, blocks_S = problem.costs, problem.allowed, problem.costs.blocks_S
        own_S = blocks_S.max() + 1 + np.arange(len(blocks_S))
        size_S = np.where(problem.pinned_S, own_S, blocks_S)
        _, first_Z, size_S = np.unique(size_S, return_index=True, return_inverse=True)
        floor_LZ, top_LZ = allowed.floor_LS[:, first_Z], allowed.top_LS[:, first_Z]
        blocks_Z = blocks_S[first_Z]
        steps = budget_steps(costs, problem.coverage, blocks_Z, floor_LZ, top_LZ)
        return cls(size_S=size_S, blocks_Z=blocks_Z, budgets_QLZ=budgets_by_level(steps))

    @property
    def rises_S(self) -> np.ndarray:
        """Mask of the samples that the levels raise in any layer."""
        return (self.budgets_QLZ[0] < self.budgets_QLZ[-1]).any(axis=0)[self.size_S]

    def budgets_LS(self, level_LS: np.ndarray) -> np.ndarray:
        """Budgets with every layer of every sample at a level of its own."""
        layer_L1 = np.arange(len(level_LS))[:, None]
        return self.budgets_QLZ[level_LS, layer_L1, self.size_S]


def budgets_by_level(steps: "BudgetSteps") -> np.ndarray:
    """The budget of each sequence once all its steps up to a level are taken, [Q, ...].

    The slope of a sequence never rises, so neither do its levels fall: a step's point may simply be
    written down at its level, later points over earlier ones, and holds until the next level that
    has one.
    """
    points = steps.points_LSK.shape[-1]
    level_KI = _levels(steps).reshape(-1, points).T
    point_KI = steps.points_LSK.reshape(-1, points).T
    never_taken = LEVELS + 1
    budgets_QI = np.zeros((never_taken + 1, level_KI.shape[1]), dtype=np.int64)
    column_I = np.arange(level_KI.shape[1])
    for level_I, point_I in zip(level_KI, point_KI, strict=True):
        budgets_QI[level_I, column_I] = point_I
    budgets_QI[0] = steps.low_LS.ravel()
    reached_QI = np.maximum.accumulate(budgets_QI[:never_taken], axis=0)
    return reached_QI.reshape(-1, *steps.low_LS.shape)


def _levels(steps: "BudgetSteps") -> np.ndarray:
    """Price level 1..LEVELS of every step, best slope first; beyond that: never worth taking.

    Levels are quantiles of the slope, so that each holds about as many steps. Steps that gain
    nothing are worth nothing.
    """
    worth_LSK = (steps.pairs_LSK > 0) & (steps.slope_LSK > 0)
    layers, sizes, _ = worth_LSK.shape
    # Other layers come first for other sizes.
    order_LS = np.arange(layers)[:, None] + np.arange(sizes)
    scale_LS = 1.0 + _TIE_BREAK * (order_LS * _GOLDEN_RATIO % 1.0)
    scaled_LSK = steps.slope_LSK * scale_LS[..., None]
    level_LSK = np.full(worth_LSK.shape, LEVELS + 1)
    slopes = scaled_LSK[worth_LSK]
    if len(slopes):
        ranks = np.linspace(0, len(slopes) - 1, LEVELS).astype(np.int64)
        edges = np.unique(np.sort(slopes)[ranks])
        level_LSK[worth_LSK] = len(edges) - np.searchsorted(edges, slopes, side="right") + 1
    return level_LSK


@dataclass(frozen=True, kw_only=True)
class BudgetSteps:
    """The steps of every (layer, sample) between two budgets; step k leads to ``points_LSK[k]``.

    ``slope_LSK``: coverage per ms on the concave envelope, non-increasing along K; -inf where
    there is no step.
    """

    low_LS: np.ndarray
    points_LSK: np.ndarray
    pairs_LSK: np.ndarray
    slope_LSK: np.ndarray

    def budgets_LS(self, taken_LSK: np.ndarray) -> np.ndarray:
        """Budgets after the taken steps, which are a prefix of every sequence."""
        reached_LSK = np.where(taken_LSK & (self.pairs_LSK > 0), self.points_LSK, 0)
        return np.maximum(reached_LSK.max(axis=-1), self.low_LS)


def budget_steps(
    costs: StepCosts,
    coverage: CoverageCurves,
    length_blocks_S: np.ndarray,
    low_LS: np.ndarray,
    high_LS: np.ndarray,
) -> BudgetSteps:
    """Steps of samples of any lengths.

    Clipping grid, coverage and pairs to [low, high] alike works since all three only grow.

    Grid budgets below every low and above every high are left out; one remains where all lows lie
    above the grid, as pinned budgets may.
    """
    every_K = np.asarray(coverage.grid)
    first = np.searchsorted(every_K, low_LS.min(), side="right")
    last = np.searchsorted(every_K, high_LS.max())
    inside = slice(min(first, last, len(every_K) - 1), last + 1)
    grid = every_K[inside]
    points_LSK = np.clip(grid, low_LS[..., None], high_LS[..., None])
    blocks_S = np.ceil(length_blocks_S).astype(np.int64)
    grid_pairs_SK = costs.work.attended_pairs(length_blocks_S[:, None], grid)
    low_pairs_LS, high_pairs_LS = (
        costs.work.attended_pairs(length_blocks_S, each_LS) for each_LS in (low_LS, high_LS)
    )
    low_gain_LS, high_gain_LS = (
        np.nan_to_num(coverage.coverage_LS(blocks_S, each_LS)) for each_LS in (low_LS, high_LS)
    )

    def between(grid_values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        inner = np.clip(grid_values, low[..., None], high[..., None])
        inner = np.where(grid >= high_LS[..., None], high[..., None], inner)
        return np.diff(inner, axis=-1, prepend=low[..., None])

    pairs_LSK = between(grid_pairs_SK, low_pairs_LS, high_pairs_LS)
    gain_LSK = between(coverage.curves_LSK(blocks_S)[..., inside], low_gain_LS, high_gain_LS)
    ms_LSK = pairs_LSK * costs.pair_ms_L[:, None, None]
    return BudgetSteps(
        low_LS=low_LS,
        points_LSK=points_LSK,
        pairs_LSK=pairs_LSK,
        slope_LSK=envelope_slopes(gain_LSK, ms_LSK, pairs_LSK > 0),
    )


def envelope_slopes(gain_LSK: np.ndarray, ms_LSK: np.ndarray, real_LSK: np.ndarray) -> np.ndarray:
    """Slopes of the concave envelope of each sequence; -inf for steps that are none."""
    slope_LSK = np.where(real_LSK, gain_LSK / np.maximum(ms_LSK, _LEAST_MS), -np.inf)
    lowest_LSK = np.minimum.accumulate(np.where(real_LSK, slope_LSK, np.inf), axis=-1)
    rises_LS = (real_LSK & (slope_LSK > lowest_LSK)).any(axis=-1)
    if rises_LS.any():
        slope_LSK[rises_LS] = _convex_envelope(
            gain_LSK[rises_LS], ms_LSK[rises_LS], real_LSK[rises_LS]
        )
    return slope_LSK


def _convex_envelope(gain_IK: np.ndarray, ms_IK: np.ndarray, real_IK: np.ndarray) -> np.ndarray:
    """From each point the best average slope ahead; its running minimum is the envelope's slope."""
    gain_KI = np.zeros((gain_IK.shape[1] + 1, len(gain_IK)))
    ms_KI = np.zeros_like(gain_KI)
    np.cumsum(gain_IK.T, axis=0, out=gain_KI[1:])
    np.cumsum(np.maximum(ms_IK.T, _LEAST_MS), axis=0, out=ms_KI[1:])
    # Steps that are none, beside large ones, may leave no difference at all.
    ms_KI += np.arange(len(ms_KI))[:, None] * (ms_KI[-1] * _NO_TIME)
    best_KI = np.full(gain_IK.T.shape, np.inf)
    for first, (best_I, real_I) in enumerate(zip(best_KI, real_IK.T, strict=True)):
        gain = gain_KI[first + 1 :] - gain_KI[first]
        gain /= ms_KI[first + 1 :] - ms_KI[first]
        np.copyto(best_I, gain.max(axis=0), where=real_I)
    return np.where(real_IK, np.minimum.accumulate(best_KI, axis=0).T, -np.inf)
