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
_OWN_AND_FIRST = 2
"""Blocks that every query reads, whatever it selects."""


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

    1. All layers get the least budget: :data:`LEAST_SHARE` of the base budget, rounded up, and at
       least the own and the first block.
    2. The most sensitive layer gets blocks until it reads the longest sample whole, then the next
       one, as long as the block pairs of all layers and samples together are at most those of the
       base budget everywhere. Sensitivities name the layers; by how much they differ says little
       (research/pretrained.md).
    3. What does not suffice for one more block there is given to the other layers in the same
       order, a block each, in rounds, until no layer can have one more.

    Args:
        sensitivity_L: to any scale.
        base_budget: blocks; the mean in time.
        length_blocks_S: of the samples that are trained on; a block that is begun counts whole.
        work: pairs that a budget computes.
    """
    length_X, count_X = np.unique(np.ceil(length_blocks_S), return_counts=True)
    most = max(int(length_X[-1]), 1)
    pairs_K = work.attended_pairs(length_X, np.arange(most + 1).clip(1)[:, None]) @ count_X
    base = min(base_budget, most)
    least = min(max(int(np.ceil(LEAST_SHARE * base)), _OWN_AND_FIRST), base)
    budget_L = np.full(len(sensitivity_L), least, dtype=np.int64)
    left = len(budget_L) * (pairs_K[base] * (1.0 + 1e-9) - pairs_K[least])
    order = np.argsort(-sensitivity_L, kind="stable")
    for layer in order:
        affordable = int(np.searchsorted(pairs_K[least:] - pairs_K[least], left, side="right"))
        budget_L[layer] = least + max(affordable - 1, 0)
        left -= pairs_K[budget_L[layer]] - pairs_K[least]
    while True:
        raised = False
        for layer in order[budget_L[order] < most]:
            more = pairs_K[budget_L[layer] + 1] - pairs_K[budget_L[layer]]
            if more <= left:
                budget_L[layer] += 1
                left -= more
                raised = True
        if not raised:
            return budget_L
