# SPDX-License-Identifier: Apache-2.0
"""Attention budgets per sample and layer (DST): towards an anchor, or against the makespan.

Both policies trade in *steps*: from one grid budget of a (layer, sample) to the next, with a price
in ms and a gain in coverage. Steps are ranked by gain per ms on the concave envelope of the curve,
so that a ranking by gain never asks for a later step before an earlier one.

Shape legend: S samples, L layers, K grid budgets, I chosen chains or steps, Q price levels,
D ranks, M micro-batches, J = D x M slots, C = P x V chunks, U = J x C units, P stages, V chunks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

from sparsebalance_megatron.plan.coverage import CoverageCurves, least_feasible_budget
from sparsebalance_megatron.plan.filling import LEVELS, Filling
from sparsebalance_megatron.plan.latency import StepCosts
from sparsebalance_megatron.plan.pipeline import makespans_ms
from sparsebalance_megatron.plan.step_plan import PlanError, PlanPolicy

_LEAST_MS = 1e-30
_ROUNDING = 1.0 + 1e-9


@dataclass(frozen=True, kw_only=True)
class TunedBudgets:
    """``budgets_LS`` int32; where nothing was tuned it is the base budget itself.

    ``cut_S``, ``raised_S``: some layer is below, above the base budget. ``clamped_S``: the sample
    could not follow: its micro-batch did not reach the anchor, or all its layers lie at their
    floors on a rank that the step waits for.
    """

    budgets_LS: np.ndarray
    cut_S: np.ndarray
    raised_S: np.ndarray
    clamped_S: np.ndarray


@dataclass(frozen=True, kw_only=True)
class BudgetRange:
    """Feasible budgets of every (layer, sample), int64 [L, S]: floor <= base <= top.

    Never observed curves allow no move: floor = base = top.
    """

    floor_LS: np.ndarray
    base_LS: np.ndarray
    top_LS: np.ndarray


def feasible_range(costs: StepCosts, coverage: CoverageCurves, policy: PlanPolicy) -> BudgetRange:
    """Budgets that keep coverage within the policy's threshold of the base budget's."""
    base_S = np.minimum(policy.base_budget, costs.blocks_S)
    base_LS = np.broadcast_to(base_S, (coverage.layers, len(base_S)))
    if policy.tuning == "off":
        return BudgetRange(floor_LS=base_LS, base_LS=base_LS, top_LS=base_LS)
    floor_LS = least_feasible_budget(
        coverage, costs.blocks_S, policy.base_budget, policy.coverage_threshold
    )
    observed_LS = coverage.observed_LS(costs.blocks_S)
    top_LS = np.where(observed_LS, np.maximum(costs.blocks_S, base_LS), base_LS)
    return BudgetRange(floor_LS=floor_LS, base_LS=base_LS, top_LS=top_LS)


def tune(
    policy: PlanPolicy,
    costs: StepCosts,
    coverage: CoverageCurves,
    allowed: BudgetRange,
    slot_of_S: np.ndarray,
    schedule: str,
) -> TunedBudgets:
    """Budgets of a placed global batch under ``policy.tuning``.

    Raises:
        PlanError: the policy names an unknown tuning or anchor.
    """
    match policy.tuning:
        case "off":
            tuned_LS, clamped_S = allowed.base_LS, np.zeros(len(slot_of_S), dtype=bool)
        case "anchor":
            tuned_LS, clamped_S = _anchor(policy.anchor, costs, coverage, allowed, slot_of_S)
        case "makespan":
            tuned_LS, clamped_S = _makespan(costs, coverage, allowed, slot_of_S, schedule)
        case other:
            raise PlanError(f"tuning {other!r} is not one of off, anchor, makespan")
    same_LS = tuned_LS == allowed.base_LS
    return TunedBudgets(
        budgets_LS=np.where(same_LS, policy.base_budget, tuned_LS).astype(np.int32),
        cut_S=(tuned_LS < allowed.base_LS).any(axis=0),
        raised_S=(tuned_LS > allowed.base_LS).any(axis=0),
        clamped_S=clamped_S,
    )


@dataclass(frozen=True, kw_only=True)
class _Steps:
    """The steps of every (layer, sample) between two budgets; step k leads to ``points_LSK[k]``.

    ``slope_LSK``: coverage per ms on the concave envelope, non-increasing along K; -inf where
    there is no step.
    """

    low_LS: np.ndarray
    points_LSK: np.ndarray
    pairs_LSK: np.ndarray
    slope_LSK: np.ndarray

    def budgets_LS(self, taken_LSK: np.ndarray) -> np.ndarray:
        """Budgets after the taken steps, which are a prefix of every chain."""
        reached_LSK = np.where(taken_LSK & (self.pairs_LSK > 0), self.points_LSK, 0)
        return np.maximum(reached_LSK.max(axis=-1), self.low_LS)


def _steps(
    costs: StepCosts, coverage: CoverageCurves, low_LS: np.ndarray, high_LS: np.ndarray
) -> _Steps:
    """Clipping grid, coverage and pairs to [low, high] alike works since all three only grow."""
    grid = np.asarray(coverage.grid)
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
    gain_LSK = between(coverage.curves_LSK(costs.blocks_S), low_gain_LS, high_gain_LS)
    ms_LSK = pairs_LSK * costs.pair_ms_L[:, None, None]
    return _Steps(
        low_LS=low_LS,
        points_LSK=points_LSK,
        pairs_LSK=pairs_LSK,
        slope_LSK=_envelope_slopes(gain_LSK, ms_LSK, pairs_LSK > 0),
    )


def _envelope_slopes(gain_LSK: np.ndarray, ms_LSK: np.ndarray, real_LSK: np.ndarray) -> np.ndarray:
    """Slopes of the concave envelope of each chain; -inf for steps that are none."""
    slope_LSK = np.where(real_LSK, gain_LSK / np.maximum(ms_LSK, _LEAST_MS), -np.inf)
    rises_LS = _rises(slope_LSK, real_LSK)
    if rises_LS.any():
        slope_LSK[rises_LS] = _envelope_of_chains(
            gain_LSK[rises_LS], ms_LSK[rises_LS], real_LSK[rises_LS]
        )
    return slope_LSK


def _rises(slope_LSK: np.ndarray, real_LSK: np.ndarray) -> np.ndarray:
    lowest_LSK = np.minimum.accumulate(np.where(real_LSK, slope_LSK, np.inf), axis=-1)
    return (real_LSK & (slope_LSK > lowest_LSK)).any(axis=-1)


def _envelope_of_chains(gain_IK: np.ndarray, ms_IK: np.ndarray, real_IK: np.ndarray) -> np.ndarray:
    """From each point the best average slope ahead; its running minimum is the envelope's slope."""
    start_I1 = np.zeros((len(gain_IK), 1))
    gain_KI = np.cumsum(np.hstack([start_I1, gain_IK]), axis=1).T.copy()
    ms_KI = np.cumsum(np.hstack([start_I1, ms_IK]), axis=1).T.copy()
    best_KI = np.full(gain_IK.T.shape, np.inf)
    for first, best_I in enumerate(best_KI):
        gain, ms = gain_KI[first + 1 :] - gain_KI[first], ms_KI[first + 1 :] - ms_KI[first]
        np.maximum(ms, _LEAST_MS, out=ms)
        best_I[real_IK[:, first]] = np.divide(gain, ms, out=gain).max(axis=0)[real_IK[:, first]]
    return np.where(real_IK, np.minimum.accumulate(best_KI, axis=0).T, -np.inf)


def _anchor(
    anchor: str,
    costs: StepCosts,
    coverage: CoverageCurves,
    allowed: BudgetRange,
    slot_of_S: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Every micro-batch goes as near to the anchor latency as its feasible budgets allow.

    Slower ones only cut, the step with the least coverage per ms first; faster ones only raise,
    the step with the most first. The latency of a micro-batch is its forward and backward ms over
    all chunks.
    """
    latency_J = _latency_ms_J(costs, allowed.base_LS, slot_of_S)
    anchor_ms = _anchor_ms(anchor, latency_J)
    slower_S = (latency_J > anchor_ms)[slot_of_S]
    low_LS = np.where(slower_S, allowed.floor_LS, allowed.base_LS)
    high_LS = np.where(slower_S, allowed.base_LS, allowed.top_LS)
    steps = _steps(costs, coverage, low_LS, high_LS)
    start_J = _latency_ms_J(costs, low_LS, slot_of_S)

    index_I = np.flatnonzero(steps.pairs_LSK > 0)
    layer_I, sample_I, _ = np.unravel_index(index_I, steps.pairs_LSK.shape)
    slot_I = slot_of_S[sample_I]
    order = np.lexsort((index_I, -steps.slope_LSK.ravel()[index_I], slot_I))
    index_I, slot_I = index_I[order], slot_I[order]
    ms_I = steps.pairs_LSK.ravel()[index_I] * costs.pair_ms_L[layer_I[order]]
    taken = np.zeros(steps.pairs_LSK.size, dtype=bool)
    reached_J = start_J.copy()
    bounds = np.searchsorted(slot_I, np.arange(len(latency_J) + 1))
    for slot, (first, last) in enumerate(itertools.pairwise(bounds)):
        path = start_J[slot] + np.concatenate([[0.0], np.cumsum(ms_I[first:last])])
        nearest = int(np.abs(path - anchor_ms).argmin())
        taken[index_I[first : first + nearest]] = True
        at_end = nearest in ((0,) if latency_J[slot] > anchor_ms else (last - first,))
        reached_J[slot] = path[nearest] if at_end else anchor_ms
    clamped_J = np.abs(reached_J - anchor_ms) > 1e-9 * anchor_ms
    return steps.budgets_LS(taken.reshape(steps.pairs_LSK.shape)), clamped_J[slot_of_S]


def _anchor_ms(anchor: str, latency_J: np.ndarray) -> float:
    match anchor:
        case "mean":
            return float(latency_J.mean())
        case "min":
            return float(latency_J.min())
        case "max":
            return float(latency_J.max())
        case other:
            raise PlanError(f"anchor {other!r} is not one of mean, min, max")


def _latency_ms_J(costs: StepCosts, budgets_LS: np.ndarray, slot_of_S: np.ndarray) -> np.ndarray:
    forward_DPVM, backward_DPVM = _slots(costs, budgets_LS, slot_of_S)
    return (forward_DPVM + backward_DPVM).sum(axis=(1, 2)).ravel()


def _slots(
    costs: StepCosts, budgets_LS: np.ndarray, slot_of_S: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    return costs.slot_ms(*costs.sample_ms(budgets_LS), slot_of_S)


def _makespan(
    costs: StepCosts,
    coverage: CoverageCurves,
    allowed: BudgetRange,
    slot_of_S: np.ndarray,
    schedule: str,
) -> tuple[np.ndarray, np.ndarray]:
    """The least step time above the floors, then the most coverage in that time.

    Makespans only grow with durations, so all budgets at their floors give the least T. Raising
    then fills what every rank has left until T; see :class:`Filling`.
    """
    steps = _steps(costs, coverage, allowed.floor_LS, allowed.top_LS)
    level_LSK = _levels(steps, costs)
    forward_DPVM, backward_DPVM = _slots(costs, allowed.floor_LS, slot_of_S)
    floor_ms_D = makespans_ms(forward_DPVM, backward_DPVM, schedule=schedule)
    unit_LS = slot_of_S * costs.chunks + costs.chunk_of_layer_L[:, None]
    filling = Filling(
        costs, schedule, forward_DPVM, backward_DPVM, _growth_UQ(costs, steps, level_LSK, unit_LS)
    )
    level_U = filling.run(floor_ms_D.max() * _ROUNDING)
    tuned_LS = steps.budgets_LS(level_LSK <= level_U[unit_LS][..., None])
    waited_for_S = (floor_ms_D * _ROUNDING >= floor_ms_D.max())[slot_of_S // costs.micro_batches]
    stuck_S = ((tuned_LS == allowed.floor_LS) & (tuned_LS < allowed.top_LS)).all(axis=0)
    return tuned_LS, waited_for_S & stuck_S


def _levels(steps: _Steps, costs: StepCosts) -> np.ndarray:
    """Price level 1..LEVELS of every step, best slope first; beyond that: never worth taking.

    Levels are quantiles of the slope, so that each holds about as many steps. Steps that gain
    nothing are worth nothing.
    """
    worth_LSK = (steps.pairs_LSK > 0) & (steps.slope_LSK > 0)
    slopes_I = steps.slope_LSK[worth_LSK]
    level_LSK = np.full(worth_LSK.shape, LEVELS + 1)
    if len(slopes_I):
        ranks = np.linspace(0, len(slopes_I) - 1, LEVELS).astype(np.int64)
        edges = np.unique(np.sort(slopes_I)[ranks])
        level_LSK[worth_LSK] = len(edges) - np.searchsorted(edges, slopes_I, side="right") + 1
    return level_LSK


def _growth_UQ(
    costs: StepCosts, steps: _Steps, level_LSK: np.ndarray, unit_LS: np.ndarray
) -> np.ndarray:
    """Block pairs that each unit (slot, chunk) adds above its floors at price level 0..LEVELS."""
    units = costs.data_parallel_size * costs.micro_batches * costs.chunks
    worth_LSK = level_LSK <= LEVELS
    place_I = (unit_LS[..., None] * (LEVELS + 1) + level_LSK)[worth_LSK]
    size = units * (LEVELS + 1)
    added = np.bincount(place_I, weights=steps.pairs_LSK[worth_LSK], minlength=size)
    return np.cumsum(added.reshape(units, LEVELS + 1), axis=1)
