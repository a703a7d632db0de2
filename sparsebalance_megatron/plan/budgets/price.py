# SPDX-License-Identifier: Apache-2.0
"""Prices of coverage: budgets by price, and one price for all layers and samples of a horizon.

A step of budgets leads from one grid budget to the next, with a price in ms and a gain in coverage.
Steps are ranked by gain per ms on the concave envelope of the curve, so that a ranking by gain
never asks for a later step before an earlier one. Samples of as many blocks have the same curves,
floors and prices, so the ladder is one of sizes; one whose budgets are pinned is a size of its own.

A training step of long samples pays more for coverage than one of short samples. One price for the
samples of several steps holds their mean coverage with the least work, so each step wants what its
own samples take at that price. Large global batches are a horizon by themselves.

Shape legend: S samples of the horizon, L layers, K budgets of the grid, Z sizes (samples of as many
blocks), Q price levels, I sequences of steps (of a layer and sample or size), B means held.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from sparsebalance_megatron.plan.budgets.problem import ROUNDING, BudgetProblem
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_costs import StepCosts

HORIZON_SAMPLES = 64
"""Least samples of a horizon; longer horizons gain little and take longer to plan."""
LEVELS = 128
LEVELS_TO_BASE = LEVELS // 2
"""Levels below base budgets, of a ladder on which all samples reach those before any has more."""
_TIE_BREAK = 0.05
"""Slopes are scaled by 1 to 1 plus this. Layers whose curves are alike would otherwise rise
together, and a chunk's budgets could not fill what is left of a step."""
_GOLDEN_RATIO = (5**0.5 - 1) / 2
_LEAST_MS = 1e-30
_NO_TIME = 1e-14
_LEAST_OF_BEST = 0.01
"""Share of a length's best slope below which its last coverage sets no price: it may be noise."""


@dataclass(frozen=True, kw_only=True)
class Pricing:
    """The price of coverage for the own samples of a step.

    ``ladder``: their budgets by price level. ``expected_LS``: budgets to place them by, before
    tuning ``makespan`` knows their places. ``wanted_B``: coverage that tuned budgets reach, by
    weight, summed over the layers and samples whose curves are known; -inf where none is wanted.
    ``limit_LS``: budgets whose time the step may take, whatever is wanted.
    """

    ladder: Ladder
    expected_LS: np.ndarray
    wanted_B: np.ndarray
    limit_LS: np.ndarray

    @property
    def wanted_coverage(self) -> float:
        """The sum of what is wanted."""
        return float(self.wanted_B.sum())


def horizon_steps(global_batch_size: int) -> int:
    """Steps of a horizon, the one that is planned included."""
    return -(-HORIZON_SAMPLES // global_batch_size)


def price_from_base(problem: BudgetProblem) -> Pricing:
    """The price of a step that cuts no more than it has to: all samples reach their base budgets
    before any has more.

    Samples are placed by base budgets. Where mean coverage is held, it is that of this step's, less
    the policy's slack.
    """
    base_LS, plan_settings = problem.allowed.base_LS, problem.plan_settings
    wanted_B = np.full(len(problem.worth_B), -np.inf)
    if plan_settings.coverage_target == "base":
        wanted_LS = problem.coverage_LS(base_LS) - plan_settings.coverage_slack
        wanted_S = np.nansum(wanted_LS * problem.weight_S, axis=0)
        wanted_B = np.bincount(problem.mean_S, wanted_S, len(wanted_B))
    return Pricing(
        ladder=price_ladder(problem, base_first=True),
        expected_LS=base_LS,
        wanted_B=wanted_B,
        limit_LS=base_LS,
    )


def price(
    problem: BudgetProblem,
    own_samples: slice = slice(None),
    coverage_deficit: np.ndarray | float = 0.0,
) -> Pricing:
    """The price of a step whose samples are those of the horizon in ``own_samples``.

    Without a coverage target the slowest rank ends at its floors, and those are expected. With
    target ``base`` it is the least work whose mean coverage, over the horizon, is that of the base
    budgets less the policy's slack, and ``coverage_deficit``, by weight, above it; or below, where
    that is negative. Where every length holds its own mean, each does so at a level of its own.

    A step that is a horizon by itself may take the time of base budgets. The steps of a longer
    horizon may take it together: their work at base budgets is shared out at one price.
    """
    ladder = price_ladder(problem)
    floor_LS, base_LS = problem.allowed.floor_LS, problem.allowed.base_LS
    found = Pricing(
        ladder=ladder.of(own_samples),
        expected_LS=floor_LS[:, own_samples].copy(),
        wanted_B=np.full(len(problem.worth_B), -np.inf),
        limit_LS=base_LS[:, own_samples].copy(),
    )
    if problem.plan_settings.coverage_target != "base":
        return found
    found.wanted_B[:] = 0.0
    owed_B = np.broadcast_to(coverage_deficit, len(problem.worth_B)) * problem.worth_B
    for mean in np.unique(problem.mean_S):
        of_mean_S = problem.mean_S == mean
        part = replace(problem, weight_S=np.where(of_mean_S, problem.weight_S, 0.0))
        own_S = of_mean_S[own_samples]
        expected_LS, found.wanted_B[mean], limit_LS = _held(part, ladder, own_samples, owed_B[mean])
        found.expected_LS[:, own_S] = expected_LS[:, own_S]
        found.limit_LS[:, own_S] = limit_LS[:, own_S]
    return found


def _held(
    problem: BudgetProblem, ladder: Ladder, own_samples: slice, coverage_deficit: float
) -> tuple[np.ndarray, float, np.ndarray]:
    """What :class:`Pricing` says of the samples whose weight is not 0, where they hold a mean."""
    own, base_LS = ladder.of(own_samples), problem.allowed.base_LS
    blocks_Z, weight_Z = ladder.blocks_Z, ladder.sum_Z(problem.weight_S)

    def coverage_Z(budgets_LZ: np.ndarray) -> np.ndarray:
        """Coverage of a sample of each size, summed over layers whose curves are known."""
        return np.nansum(problem.coverage.coverage_LS(blocks_Z, budgets_LZ), axis=0)

    def sum_at(level: int) -> float:
        return float((coverage_Z(ladder.budgets_QLZ[level]) * weight_Z).sum())

    base_LZ = problem.coverage.coverage_LS(blocks_Z, base_LS[:, ladder.first_Z])
    surplus = coverage_deficit / weight_Z.sum() - problem.plan_settings.coverage_slack
    wanted = float((np.nansum(base_LZ + surplus, axis=0) * weight_Z).sum())
    high = _least_level(lambda level: sum_at(level) * ROUNDING >= wanted)
    # Where many steps of budgets have one price, its level takes all of them: go there in part.
    less_Z, more_Z = (coverage_Z(ladder.budgets_QLZ[level]) for level in (max(high - 1, 0), high))
    less, gap = float((less_Z * weight_Z).sum()), float(((more_Z - less_Z) * weight_Z).sum())
    share = min(max((wanted - less) / gap, 0.0), 1.0) if gap > 0.0 else 1.0
    wanted_Z = (1.0 - share) * less_Z + share * more_Z
    limit_LS = base_LS
    if len(own.size_S) < len(ladder.size_S):
        at_base = float((np.nansum(base_LZ, axis=0) * weight_Z).sum())
        holds = _least_level(lambda level: sum_at(level) * ROUNDING >= at_base)
        limit_LS = own.common_LS(max(_level_of_base_work(problem, ladder), holds))
    wanted = float((wanted_Z * own.sum_Z(problem.weight_S[own_samples])).sum())
    return own.common_LS(high), wanted, limit_LS


def worth_of_means(problem: BudgetProblem, coverage_deficit: np.ndarray | float) -> np.ndarray:
    """[B] ms for which the last coverage is bought where each mean is held.

    With coverage worth so much, one price holds them all.
    """
    pricing = price(problem, coverage_deficit=coverage_deficit)
    first_Z, steps = pricing.ladder.first_Z, pricing.ladder.steps
    taken_LZK = steps.points_LSK <= pricing.expected_LS[:, first_Z, None]
    worth_B = np.ones(len(problem.worth_B))
    for mean in np.unique(problem.mean_S):
        gains_LZK = (steps.slope_LSK > 0) & (problem.mean_S[first_Z] == mean)[:, None]
        if gains_LZK.any():
            best = steps.slope_LSK[gains_LZK].max()
            last = steps.slope_LSK[gains_LZK & taken_LZK].min(initial=best)
            worth_B[mean] = 1.0 / max(last, _LEAST_OF_BEST * best)
    return worth_B


def _level_of_base_work(problem: BudgetProblem, ladder: Ladder) -> int:
    """The highest price level, below LEVELS, at which all samples that count take no more than at
    base budgets."""
    whole = _of_whole_blocks(problem.costs, ladder.first_Z)
    samples_Z = ladder.sum_Z(problem.weight_S > 0.0)

    def work_ms(budgets_LZ: np.ndarray) -> float:
        return float((whole.block_pairs(budgets_LZ) * samples_Z * whole.pair_ms_L[:, None]).sum())

    base_ms = work_ms(problem.allowed.base_LS[:, ladder.first_Z])
    more = _least_level(lambda level: work_ms(ladder.budgets_QLZ[level]) > base_ms * ROUNDING)
    return max(more - 1, 0)


def _of_whole_blocks(costs: StepCosts, first_Z: np.ndarray) -> StepCosts:
    """Costs of a sample of each size, its last block full."""
    blocks_Z = costs.blocks_S[first_Z]
    return replace(costs, lengths_tokens_S=blocks_Z * costs.block_size, blocks_S=blocks_Z)


def _least_level(enough: Callable[[int], bool]) -> int:
    """The least price level that is enough, as all above it are; the highest if none is."""
    low, high = -1, LEVELS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """Budgets by price level, 0 (the floors) to LEVELS (everything that gains coverage).

    ``size_S``: the size of every sample. ``first_Z``: a sample of each size, among those that the
    ladder was priced for, ``blocks_Z`` its blocks, ``steps`` its prices. ``curves``: of coverage.
    """

    size_S: np.ndarray
    first_Z: np.ndarray
    blocks_Z: np.ndarray
    steps: BudgetSteps
    budgets_QLZ: np.ndarray
    curves: CoverageCurves

    @cached_property
    def coverage_ZLQ(self) -> np.ndarray:
        """Coverage of a sample of each size; 0 where the curve is not known."""
        coverage_QLZ = self.curves.coverage_LS(self.blocks_Z, self.budgets_QLZ)
        return np.ascontiguousarray(np.nan_to_num(coverage_QLZ).transpose(2, 1, 0))

    def budgets_LS(self, level_LS: np.ndarray) -> np.ndarray:
        """Budgets with every layer of every sample at a level of its own."""
        layer_L1 = np.arange(len(level_LS))[:, None]
        return self.budgets_QLZ[level_LS, layer_L1, self.size_S]

    def of(self, samples: slice) -> Ladder:
        """The ladder of some of the samples."""
        return replace(self, size_S=self.size_S[samples])

    def common_LS(self, level: int) -> np.ndarray:
        """Budgets with all at one level: no other budgets cover as much in as little time."""
        return self.budgets_QLZ[level][:, self.size_S]

    def sum_Z(self, values_S: np.ndarray) -> np.ndarray:
        """Values of samples, summed by size."""
        return np.bincount(self.size_S, values_S, minlength=len(self.first_Z))


def price_ladder(problem: BudgetProblem, *, base_first: bool = False) -> Ladder:
    """The ladder of a problem's samples.

    Prices are those of whole blocks; a ragged last block makes no difference to the ranking. Where
    tokens count, coverage gained in a long sample is worth more; where every length holds its own
    mean, as much as it costs there.

    Args:
        base_first: whether all samples return to their base budgets before any has more.
    """
    costs, allowed = problem.costs, problem.allowed
    _, first_Z, size_S = np.unique(problem.size_S, return_index=True, return_inverse=True)
    blocks_Z = costs.blocks_S[first_Z]
    whole = _of_whole_blocks(costs, first_Z)
    floor_LZ, base_LZ, top_LZ = (
        limit_LS[:, first_Z] for limit_LS in (allowed.floor_LS, allowed.base_LS, allowed.top_LS)
    )
    if base_first:
        steps = budget_steps(whole, problem.coverage, floor_LZ, base_LZ).before(
            budget_steps(whole, problem.coverage, base_LZ, top_LZ)
        )
    else:
        steps = budget_steps(whole, problem.coverage, floor_LZ, top_LZ)
    if problem.plan_settings.coverage_mean_over == "tokens":
        steps = replace(steps, slope_LSK=steps.slope_LSK * blocks_Z[:, None])
    elif len(problem.worth_B) > 1:
        worth_Z = problem.worth_B[problem.mean_S[first_Z]]
        steps = replace(steps, slope_LSK=steps.slope_LSK * worth_Z[:, None])
    return Ladder(
        size_S=size_S.reshape(-1),
        first_Z=first_Z,
        blocks_Z=blocks_Z,
        steps=steps,
        budgets_QLZ=budgets_by_level(steps),
        curves=problem.coverage,
    )


def budgets_by_level(steps: BudgetSteps) -> np.ndarray:
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


def _levels(steps: BudgetSteps) -> np.ndarray:
    """Price level 1..LEVELS of every step, best slope first; beyond that: never worth taking.

    Levels are quantiles of the slope, so that each holds about as many steps. Steps that gain
    nothing are worth nothing.
    """
    worth_LSK = (steps.pairs_LSK > 0) & (steps.slope_LSK > 0)
    layers, sizes, points = worth_LSK.shape
    # Other layers come first for other sizes.
    order_LS = np.arange(layers)[:, None] + np.arange(sizes)
    scale_LS = 1.0 + _TIE_BREAK * (order_LS * _GOLDEN_RATIO % 1.0)
    scaled_LSK = steps.slope_LSK * scale_LS[..., None]
    level_LSK = np.full(worth_LSK.shape, LEVELS + 1)
    below = LEVELS_TO_BASE if steps.first_points else 0
    for part_K, last, levels in (
        (slice(steps.first_points), below, below),
        (slice(steps.first_points, points), LEVELS, LEVELS - below),
    ):
        worth_of_part_LSK = worth_LSK[..., part_K]
        slopes = scaled_LSK[..., part_K][worth_of_part_LSK]
        if len(slopes):
            ranks = np.linspace(0, len(slopes) - 1, levels).astype(np.int64)
            edges = np.unique(np.sort(slopes)[ranks])
            after = len(edges) - np.searchsorted(edges, slopes, side="right") + 1
            level_LSK[..., part_K][worth_of_part_LSK] = last - levels + after
    return level_LSK


@dataclass(frozen=True, kw_only=True)
class BudgetSteps:
    """The steps of every (layer, sample) between two budgets; step k leads to ``points_LSK[k]``.

    ``slope_LSK``: coverage per ms on the concave envelope, non-increasing along K; -inf where
    there is no step. ``first_points``: of K, whose steps come before all others; slopes do not rise
    among them, nor among the others.
    """

    low_LS: np.ndarray
    points_LSK: np.ndarray
    pairs_LSK: np.ndarray
    slope_LSK: np.ndarray
    first_points: int = 0

    def before(self, later: BudgetSteps) -> BudgetSteps:
        """These steps, all of them before those that lead on from where they end."""
        return BudgetSteps(
            low_LS=self.low_LS,
            points_LSK=np.concatenate([self.points_LSK, later.points_LSK], axis=-1),
            pairs_LSK=np.concatenate([self.pairs_LSK, later.pairs_LSK], axis=-1),
            slope_LSK=np.concatenate([self.slope_LSK, later.slope_LSK], axis=-1),
            first_points=self.points_LSK.shape[-1],
        )

    def budgets_LS(self, taken_LSK: np.ndarray) -> np.ndarray:
        """Budgets after the taken steps, which are a prefix of every sequence."""
        reached_LSK = np.where(taken_LSK & (self.pairs_LSK > 0), self.points_LSK, 0)
        return np.maximum(reached_LSK.max(axis=-1), self.low_LS)


def budget_steps(
    costs: StepCosts, coverage: CoverageCurves, low_LS: np.ndarray, high_LS: np.ndarray
) -> BudgetSteps:
    """Clipping grid, coverage and pairs to [low, high] alike works since all three only grow.

    Grid budgets below every low and above every high are left out; one remains where all lows lie
    above the grid, as pinned budgets may.
    """
    every_K = np.asarray(coverage.grid)
    first = np.searchsorted(every_K, low_LS.min(), side="right")
    last = np.searchsorted(every_K, high_LS.max())
    inside = slice(min(first, last, len(every_K) - 1), last + 1)
    grid = every_K[inside]
    points_LSK = np.clip(grid, low_LS[..., None], high_LS[..., None])
    grid_pairs_SK = costs.block_pairs(
        np.broadcast_to(grid[:, None], (len(grid), low_LS.shape[1]))
    ).T
    low_pairs_LS, high_pairs_LS = costs.block_pairs(low_LS), costs.block_pairs(high_LS)
    low_gain_LS = np.nan_to_num(coverage.coverage_LS(costs.blocks_S, low_LS))
    high_gain_LS = np.nan_to_num(coverage.coverage_LS(costs.blocks_S, high_LS))

    def between(grid_values: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        inner = np.clip(grid_values, low[..., None], high[..., None])
        inner = np.where(grid >= high_LS[..., None], high[..., None], inner)
        return np.diff(inner, axis=-1, prepend=low[..., None])

    pairs_LSK = between(grid_pairs_SK, low_pairs_LS, high_pairs_LS)
    gain_LSK = between(coverage.curves_LSK(costs.blocks_S)[..., inside], low_gain_LS, high_gain_LS)
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
