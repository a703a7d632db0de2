# SPDX-License-Identifier: Apache-2.0
"""Score coverage against budget: one curve per layer and length bucket, averaged over steps.

Shape legend: U length buckets.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebalance_megatron.errors import PlanError

_DECAY = 0.9
"""Weight of the past in the moving average of coverage."""
_EXACT_UNTIL_BLOCKS = 8
_GROWTH = 1.25


def budget_grid(max_blocks: int) -> tuple[int, ...]:
    """Budgets (blocks) at which coverage is measured: 1..8, then steps of about x1.25, max_blocks.

    Raises:
        PlanError: ``max_blocks`` is below 1.
    """
    if max_blocks < 1:
        raise PlanError(f"budget grid: max_blocks {max_blocks} is below 1 block")
    grid = [1]
    while grid[-1] < max_blocks:
        last = grid[-1]
        following = last + 1 if last < _EXACT_UNTIL_BLOCKS else round(last * _GROWTH)
        grid.append(min(following, max_blocks))
    return tuple(grid)


def length_bucket(blocks: np.ndarray | int) -> np.ndarray:
    """Index of the length bucket of documents of ``blocks`` >= 1 blocks: floor(log2(blocks))."""
    return np.frexp(np.asarray(blocks, dtype=np.float64))[1] - 1


class CoverageCurves:
    """Mean coverage C(k) of every (layer, length bucket), an exponential average over steps.

    ``mean_LUK`` is non-decreasing along the grid and lies in [0, 1]; rows that ``observed_LU``
    does not mark hold zeros and no information.
    """

    def __init__(self, layers: int, max_blocks: int, decay: float = _DECAY) -> None:
        self.grid = budget_grid(max_blocks)
        self.decay = decay
        self.buckets = int(length_bucket(max_blocks)) + 1
        self.mean_LUK = np.zeros((layers, self.buckets, len(self.grid)))
        self.observed_LU = np.zeros((layers, self.buckets), dtype=bool)
        # Where every budget from 0 up lies: the grid budget below, and how far to the next.
        grid, budgets = np.asarray(self.grid), np.arange(max_blocks + 1)
        self._left_of = np.maximum(np.searchsorted(grid, budgets, side="right") - 1, 0)
        self._right_of = np.minimum(self._left_of + 1, len(grid) - 1)
        span = np.maximum(grid[self._right_of] - grid[self._left_of], 1)
        self._fraction_of = np.clip((budgets - grid[self._left_of]) / span, 0.0, 1.0)

    @property
    def layers(self) -> int:
        return self.mean_LUK.shape[0]

    @property
    def max_blocks(self) -> int:
        return self.grid[-1]

    def observe(self, sums_LUK: np.ndarray, counts_LU: np.ndarray) -> None:
        """Take in one step's coverage sums over ``counts_LU`` observations each.

        Buckets with count 0, or whose sums are not all finite, stay as they are; a first
        observation is taken whole. Means are clipped to [0, 1] and made non-decreasing, which
        removes the rounding of the sums.
        """
        seen_LU = (counts_LU > 0) & np.isfinite(sums_LUK).all(axis=-1)
        step_LUK = sums_LUK[seen_LU] / counts_LU[seen_LU][:, None]
        step_LUK = np.maximum.accumulate(np.clip(step_LUK, 0.0, 1.0), axis=-1)
        keep = np.where(self.observed_LU[seen_LU], self.decay, 0.0)[:, None]
        self.mean_LUK[seen_LU] = keep * self.mean_LUK[seen_LU] + (1.0 - keep) * step_LUK
        self.observed_LU |= seen_LU

    def coverage(self, layer: Any, blocks: Any, budget: Any) -> np.ndarray:
        """Expected coverage; the arguments broadcast. Linear between grid budgets.

        Exactly 1 where ``budget >= blocks``; NaN where the (layer, bucket) was never observed.

        Raises:
            PlanError: a document is longer than the grid, or a budget is below 1 block.
        """
        layer, blocks, budget = np.broadcast_arrays(layer, blocks, budget)
        bucket = self._bucket(blocks)
        if budget.size and budget.min() < 1:
            raise PlanError(f"coverage: budget {budget.min()} is below 1 block")
        inside = np.minimum(budget, self.max_blocks)
        low = self.mean_LUK[layer, bucket, self._left_of[inside]]
        high = self.mean_LUK[layer, bucket, self._right_of[inside]]
        curve = low + self._fraction_of[inside] * (high - low)
        curve = np.where(self.observed_LU[layer, bucket], curve, np.nan)
        return np.where(budget >= blocks, 1.0, curve)

    def coverage_LS(self, blocks_S: np.ndarray, budgets_LS: np.ndarray) -> np.ndarray:
        """:meth:`coverage` of every layer of every sample."""
        return self.coverage(np.arange(self.layers)[:, None], blocks_S, budgets_LS)

    def curves_LSK(self, blocks_S: np.ndarray) -> np.ndarray:
        """Coverage of every layer and sample at every grid budget; zeros where unobserved."""
        curves = self.mean_LUK[:, self._bucket(blocks_S), :]
        return np.where(np.asarray(self.grid) >= np.asarray(blocks_S)[:, None], 1.0, curves)

    def observed_LS(self, blocks_S: np.ndarray) -> np.ndarray:
        """Whether the curve of each layer and sample was ever observed."""
        return self.observed_LU[:, self._bucket(blocks_S)]

    def state_dict(self) -> dict[str, Any]:
        """Plain Python lists; floats survive JSON exactly."""
        return {
            "grid": list(self.grid),
            "mean": self.mean_LUK.tolist(),
            "observed": self.observed_LU.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore :meth:`state_dict`; the decay stays the constructor's.

        Raises:
            PlanError: the state was saved with another grid or number of layers.
        """
        if list(state["grid"]) != list(self.grid):
            raise PlanError(
                f"coverage state has budget grid {list(state['grid'])}, this job "
                f"{list(self.grid)}; resume with the same sequence length and block size"
            )
        mean_LUK = np.array(state["mean"], dtype=np.float64)
        observed_LU = np.array(state["observed"], dtype=bool)
        if mean_LUK.shape != self.mean_LUK.shape or observed_LU.shape != self.observed_LU.shape:
            raise PlanError(
                f"coverage state has shape {mean_LUK.shape} (layers, buckets, budgets), "
                f"this job {self.mean_LUK.shape}; resume with the same model"
            )
        self.mean_LUK, self.observed_LU = mean_LUK, observed_LU

    def _bucket(self, blocks: np.ndarray) -> np.ndarray:
        blocks = np.asarray(blocks)
        if blocks.size and (blocks.max() > self.max_blocks or blocks.min() < 1):
            raise PlanError(
                f"a document of {blocks.max()} blocks does not fit the coverage grid of "
                f"1 to {self.max_blocks} blocks"
                if blocks.max() > self.max_blocks
                else f"a document of {blocks.min()} blocks has no coverage curve"
            )
        return length_bucket(blocks)


def least_feasible_budget(
    curves: CoverageCurves, blocks_S: np.ndarray, base_L: np.ndarray, threshold: float
) -> np.ndarray:
    """Least budget k with C(k) >= C(k0) - p for every layer and sample (the paper's C_i(k) bound).

    ``k0 = min(base budget, blocks)`` is always feasible, so the set is never empty. Where the
    curve was never observed the result is k0: no cut without evidence.

    Returns:
        int64 [L, S], between 1 and ``min(base_L, blocks)``.
    """
    blocks_S = np.asarray(blocks_S)
    base_LS = np.minimum(base_L[:, None], blocks_S)
    target_LS = curves.coverage_LS(blocks_S, base_LS) - threshold
    low_LS, high_LS = np.ones_like(base_LS), base_LS
    while (low_LS < high_LS).any():
        middle_LS = (low_LS + high_LS) // 2
        short_LS = curves.coverage_LS(blocks_S, middle_LS) < target_LS
        low_LS = np.where(short_LS, np.minimum(middle_LS + 1, high_LS), low_LS)
        high_LS = np.where(short_LS, high_LS, middle_LS)
    return np.where(curves.observed_LS(blocks_S), low_LS, base_LS)
