# SPDX-License-Identifier: Apache-2.0
"""Attention budgets per sample and layer (DST): towards an anchor, or against the makespan.

Both policies trade in *steps*: from one grid budget of a (layer, sample) to the next, with a price
in ms and a gain in coverage. Steps are ranked by gain per ms on the concave envelope of the curve,
so that a ranking by gain never asks for a later step before an earlier one.

Shape legend: S samples, L layers, K grid budgets, I chosen chains or steps, Q price levels,
R rows (samples of as many blocks), D ranks, M micro-batches, J = D x M slots, C = P x V chunks,
U = J x C units, P stages, V chunks.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from sparsebalance_megatron.plan.coverage import CoverageCurves, least_feasible_budget
from sparsebalance_megatron.plan.filling import LEVELS, Filling
from sparsebalance_megatron.plan.latency import StepCosts
from sparsebalance_megatron.plan.pipeline import makespans_ms
from sparsebalance_megatron.plan.step_plan import PlanError, PlanPolicy

_LEAST_MS = 1e-30
_NO_TIME = 1e-14
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
    blocks_R, row_S = np.unique(costs.blocks_S, return_inverse=True)
    floor_LS = least_feasible_budget(
        coverage, blocks_R, policy.base_budget, policy.coverage_threshold
    )[:, row_S]
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
    hold_ms: float = 0.0,
) -> TunedBudgets:
    """Budgets of a placed global batch under ``policy.tuning``.

    Tuning ``makespan`` spends on coverage what the step has until ``hold_ms`` or until the least
    step time, whichever is later.

    Raises:
        PlanError: the policy names an unknown tuning or anchor.
    """
    match policy.tuning:
        case "off":
            tuned_LS, clamped_S = allowed.base_LS, np.zeros(len(slot_of_S), dtype=bool)
        case "anchor":
            tuned_LS, clamped_S = _anchor(policy.anchor, costs, coverage, allowed, slot_of_S)
        case "makespan":
            tuned_LS, clamped_S = _makespan(costs, coverage, allowed, slot_of_S, schedule, hold_ms)
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
    """Clipping grid, coverage and pairs to [low, high] alike works since all three only grow.

    Grid budgets below every low and above every high are left out.
    """
    every_K = np.asarray(coverage.grid)
    first = np.searchsorted(every_K, low_LS.min(), side="right")
    last = np.searchsorted(every_K, high_LS.max())
    inside = slice(min(first, last), last + 1)
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
        slower = latency_J[slot] > anchor_ms
        reached_J[slot] = max(path[0], anchor_ms) if slower else min(path[-1], anchor_ms)
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
    hold_ms: float,
) -> tuple[np.ndarray, np.ndarray]:
    """The least step time above the floors, then the most coverage in that time.

    Makespans only grow with durations, so all budgets at their floors give the least T. Raising
    then fills what every rank has left until T; see :class:`Filling`.
    """
    ladder = _ladder(costs, coverage, allowed)
    forward_DPVM, backward_DPVM = _slots(costs, allowed.floor_LS, slot_of_S)
    floor_ms_D = makespans_ms(forward_DPVM, backward_DPVM, schedule=schedule)
    filling = Filling(
        costs, schedule, forward_DPVM, backward_DPVM, _growth_UQ(costs, ladder, slot_of_S)
    )
    level_U = filling.run(max(floor_ms_D.max() * _ROUNDING, hold_ms))
    unit_LS = slot_of_S * costs.chunks + costs.chunk_of_layer_L[:, None]
    layer_L1 = np.arange(len(unit_LS))[:, None]
    tuned_LS = ladder.budgets_QLR[level_U[unit_LS], layer_L1, ladder.row_S]
    waited_for_S = (floor_ms_D * _ROUNDING >= floor_ms_D.max())[slot_of_S // costs.micro_batches]
    stuck_S = ((tuned_LS == allowed.floor_LS) & (tuned_LS < allowed.top_LS)).all(axis=0)
    return tuned_LS, waited_for_S & stuck_S


@dataclass(frozen=True, kw_only=True)
class _Ladder:
    """Budgets by price level, 0 (the floors) to LEVELS (everything that gains coverage).

    Samples of as many blocks share a row R: curves, floors and prices are theirs alike.
    """

    row_S: np.ndarray
    budgets_QLR: np.ndarray


def _ladder(costs: StepCosts, coverage: CoverageCurves, allowed: BudgetRange) -> _Ladder:
    blocks_R, first_R, row_S = np.unique(costs.blocks_S, return_index=True, return_inverse=True)
    whole = replace(costs, lengths_tokens_S=blocks_R * costs.block_size, blocks_S=blocks_R)
    steps = _steps(whole, coverage, allowed.floor_LS[:, first_R], allowed.top_LS[:, first_R])
    points = steps.points_LSK.shape[-1]
    level_KI = _levels(steps).reshape(-1, points).T
    points_KI = steps.points_LSK.reshape(-1, points).T
    budgets_QI = np.zeros((LEVELS + 2, level_KI.shape[1]), dtype=np.int64)
    chain_I = np.arange(level_KI.shape[1])
    for level_I, point_I in zip(level_KI, points_KI, strict=True):
        budgets_QI[level_I, chain_I] = point_I
    budgets_QI[0] = steps.low_LS.ravel()
    budgets_QI = np.maximum.accumulate(budgets_QI[: LEVELS + 1], axis=0)
    return _Ladder(row_S=row_S.reshape(-1), budgets_QLR=budgets_QI.reshape(-1, *steps.low_LS.shape))


def _levels(steps: _Steps) -> np.ndarray:
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


def _growth_UQ(costs: StepCosts, ladder: _Ladder, slot_of_S: np.ndarray) -> np.ndarray:
    """Block pairs that each unit (slot, chunk) adds above its floors at price level 0..LEVELS.

    At budgets up to the sample's blocks, the pairs of x blocks (fractional) at budget k are
    ``x k - k (k - 1) / 2`` and a term without k, so a chunk needs two sums over its layers only.
    """
    order_S = np.argsort(slot_of_S, kind="stable")
    slots = costs.data_parallel_size * costs.micro_batches
    first_J = np.searchsorted(slot_of_S[order_S], np.arange(slots))
    length_S = (costs.lengths_tokens_S / costs.block_size)[order_S]
    row_S = ladder.row_S[order_S]
    growth_QJC = np.empty((LEVELS + 1, slots, costs.chunks))
    for chunk in range(costs.chunks):
        budgets_QIR = ladder.budgets_QLR[:, costs.chunk_of_layer_L == chunk]
        sum_QR = budgets_QIR.sum(axis=1)
        lost_QR = (budgets_QIR * (budgets_QIR - 1) // 2).sum(axis=1)
        sum_QR, lost_QR = sum_QR - sum_QR[0], lost_QR - lost_QR[0]
        pairs_QS = length_S * sum_QR[:, row_S] - lost_QR[:, row_S]
        growth_QJC[..., chunk] = np.add.reduceat(pairs_QS, first_J, axis=1)
    return growth_QJC.reshape(LEVELS + 1, slots * costs.chunks).T.copy()
