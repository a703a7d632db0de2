# SPDX-License-Identifier: Apache-2.0
"""Base budgets by layer, from how sensitive layers are, at the time of one budget in all layers.

A few layers carry a model's look-ups: they need many blocks, the others few. Which layers do is
measured before training (``sparse-balance sensitivity``) and read here.

Shape legend: L layers, S samples.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.sensitivity import read_sensitivities
from sparsebalance_megatron.cost.work_model import WorkModel, work_model_named
from sparsebalance_megatron.layer_budgets import layer_budgets_text

LEAST_SHARE = 0.625
"""What every layer keeps of the base budget, whatever its sensitivity."""
_HALVINGS = 60


def with_layer_budgets(
    config: SparseBalanceConfig, layers: int, lengths_tokens: np.ndarray
) -> SparseBalanceConfig:
    """The choices with the layer budgets that follow from the file of sensitivities, if one is
    given.

    Args:
        layers: of the model.
        lengths_tokens: of all training samples.

    Raises:
        ConfigError: see :func:`.read_sensitivities`.
    """
    if config.sensitivity is None:
        return config
    sensitivity_L = read_sensitivities(Path(config.sensitivity), layers)
    base_L = budgets_by_sensitivity(
        sensitivity_L,
        config.base_budget,
        lengths_tokens / config.block_size,
        work_model_named(config.selection),
    )
    named = {layer: int(budget) for layer, budget in enumerate(base_L)}
    return replace(config, sensitivity=None, layer_budgets=layer_budgets_text(named))


def budgets_by_sensitivity(
    sensitivity_L: np.ndarray, base_budget: int, length_blocks_S: np.ndarray, work: WorkModel
) -> np.ndarray:
    """Base budget of every layer, int64 [L].

    1. All layers get the least budget: :data:`LEAST_SHARE` of the base budget, rounded up.
    2. What is left is shared in proportion to the square of the sensitivity, so that the block
       pairs of all layers and samples together are at most those of the base budget everywhere.
       No layer gets more than the longest sample has blocks. The factor is found by bisection.
    3. What rounding down left is given in rounds, a block a layer, first to the layer whose budget
       was rounded down most, until no layer can have one more.

    Args:
        sensitivity_L: to any scale, not all 0.
        base_budget: blocks; the mean in time.
        length_blocks_S: of the samples that are trained on; a block that is begun counts whole.
        work: pairs that a budget computes.
    """
    length_X, count_X = np.unique(np.ceil(length_blocks_S), return_counts=True)
    most = max(int(length_X[-1]), 1)
    pairs_K = work.attended_pairs(length_X, np.arange(most + 1).clip(1)[:, None]) @ count_X
    base = min(base_budget, most)
    allowed = len(sensitivity_L) * pairs_K[base] * (1.0 + 1e-9)
    least = min(int(np.ceil(LEAST_SHARE * base)), base)
    square_L = (sensitivity_L / sensitivity_L.max()) ** 2

    def wanted_L(factor: float) -> np.ndarray:
        return np.minimum(least + factor * square_L, most)

    low, high = 0.0, most / square_L[square_L > 0.0].min()
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        fits = pairs_K[wanted_L(middle).astype(np.int64)].sum() <= allowed
        low, high = (middle, high) if fits else (low, middle)
    budget_L = wanted_L(low).astype(np.int64)
    order = np.argsort(budget_L - wanted_L(low), kind="stable")
    while True:
        before_L = budget_L
        for layer in order:
            raised_L = budget_L.copy()
            raised_L[layer] = min(raised_L[layer] + 1, most)
            if pairs_K[raised_L].sum() <= allowed:
                budget_L = raised_L
        if (budget_L == before_L).all():
            return budget_L
