# SPDX-License-Identifier: Apache-2.0
"""Base budgets by layer, from how sensitive layers are, at the time of one budget in all layers.

A few layers carry a model's look-ups: they need many blocks, the others few. Which layers do is
measured before training (``sparse-balance sensitivity``) and read here.

Shape legend: L layers, S samples, K budgets that a layer may have, X lengths of samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.sensitivity import read_sensitivities
from sparsebalance_megatron.cost.work_model import FEATURES, WorkModel, features
from sparsebalance_megatron.layer_budgets import DENSE, layer_budgets_text
from sparsebalance_megatron.plan.job import Job

LEAST_SHARE = 0.625
"""What every layer keeps of the base budget, whatever its sensitivity."""
_OWN_AND_FIRST = 2
"""Blocks that every query reads, whatever it selects."""


def with_layer_budgets(
    config: SparseBalanceConfig, job: Job, lengths_tokens: np.ndarray, cost: CostModel
) -> tuple[SparseBalanceConfig, tuple[str, ...]]:
    """The choices with the layer budgets that follow from the file of sensitivities, if one is
    given, and lines that say so.

    Every pipeline stage takes at most the time of the base budget in all of its layers, so that
    no step waits longer for one.

    Args:
        lengths_tokens: of all training samples.
        cost: of the run; dense attention is chosen only where its cost is known.

    Raises:
        ConfigError: see :func:`.read_sensitivities`.
    """
    if config.sensitivity is None:
        return config, ()
    sensitivity_L = read_sensitivities(Path(config.sensitivity), job.layers)
    choices = budget_choices(config, lengths_tokens, cost)
    base_L = np.empty(job.layers, dtype=np.int64)
    for stage in job.stage_layers:
        layers = [layer for chunk in stage for layer in chunk]
        base_L[layers] = budgets_by_sensitivity(sensitivity_L[layers], choices)
    text = layer_budgets_text({layer: int(budget) for layer, budget in enumerate(base_L)})
    lines = (
        f"base budgets by sensitivity: {text}: {choices.share_of(base_L):.2f} times the predicted "
        f"attention time of {config.base_budget} blocks in all layers",
        *_held_back(sensitivity_L, base_L),
    )
    return replace(config, sensitivity=None, layer_budgets=text), lines


@dataclass(frozen=True, kw_only=True)
class BudgetChoices:
    """What one layer may have, and the time that it then takes over all samples.

    Attributes:
        budget_K: blocks, rising; the last may be :data:`.DENSE`.
        time_K: in any unit, rising.
        base_time: of the base budget.
    """

    budget_K: np.ndarray
    time_K: np.ndarray
    base_time: float

    @classmethod
    def of(
        cls,
        base_budget: int,
        time_K: np.ndarray,
        *,
        dense_time: float = np.inf,
        least_share: float = LEAST_SHARE,
    ) -> BudgetChoices:
        """From the least budget on: a share of the base budget, rounded up, and at least the own
        and the first block. Dense attention stands in for lists that take as long.

        Args:
            base_budget: blocks; at most the last of ``time_K``.
            time_K: of 0, 1, ... blocks, up to those of the longest sample.
            dense_time: infinity where it is unknown.
        """
        least = min(max(int(np.ceil(least_share * base_budget)), _OWN_AND_FIRST), base_budget)
        budget_K = np.arange(least, len(time_K))
        budget_K = budget_K[time_K[least:] < dense_time]
        chosen_K = time_K[budget_K]
        if np.isfinite(dense_time):
            budget_K, chosen_K = np.append(budget_K, DENSE), np.append(chosen_K, dense_time)
        return cls(budget_K=budget_K, time_K=chosen_K, base_time=float(time_K[base_budget]))

    def share_of(self, budget_L: np.ndarray) -> float:
        """Time of layers over that of as many at the base budget."""
        times = self.time_K[np.searchsorted(self.budget_K, budget_L)]
        return float(times.sum() / (len(budget_L) * self.base_time))


def budget_choices(
    config: SparseBalanceConfig, lengths_tokens: np.ndarray, cost: CostModel
) -> BudgetChoices:
    """The choices by predicted ms, forward and backward, the router included.

    A block that is begun counts whole.
    """
    blocks_S = np.ceil(lengths_tokens / config.block_size)
    pairs_K = pairs_by_budget(blocks_S, cost.work)
    everything = features(blocks_S * config.block_size, np.inf, config.block_size, cost.work)
    sparse, dense = np.zeros(len(FEATURES)), np.zeros(len(FEATURES))
    knows_dense = Part.DENSE_ATTENTION in cost.forward_ms and config.attention != "tokens"
    for direction in Direction:
        for part in (Part.ATTENTION, Part.ROUTER):
            sparse += cost.coefficients_ms(part, direction)
        if knows_dense:
            dense += cost.coefficients_ms(Part.DENSE_ATTENTION, direction)
    pairs = FEATURES.index("block_pairs")
    ms_K = sparse @ everything + sparse[pairs] * (pairs_K - everything[pairs])
    return BudgetChoices.of(
        min(config.base_budget, len(ms_K) - 1),
        ms_K,
        dense_time=float(dense @ everything) if knows_dense else np.inf,
    )


def pairs_by_budget(length_blocks_S: np.ndarray, work: WorkModel) -> np.ndarray:
    """Block pairs of all samples at 0, 1, ... blocks, up to those of the longest; 0 counts as 1."""
    length_X, count_X = np.unique(length_blocks_S, return_counts=True)
    budgets = np.arange(max(int(length_X[-1]), 1) + 1).clip(1)
    return np.array([work.attended_pairs(length_X, budget) @ count_X for budget in budgets])


def budgets_by_sensitivity(sensitivity_L: np.ndarray, choices: BudgetChoices) -> np.ndarray:
    """Base budget of every layer, int64 [L].

    1. All layers get the least budget.
    2. The most sensitive layer gets blocks until it reads everything, then the next one, as long
       as all layers together take no more time than at the base budget. Sensitivities name the
       layers; by how much they differ says little (research/pretrained.md).
    3. What does not suffice for one more block there is given to the other layers in the same
       order, a block each, in rounds, until no layer can have one more.

    Args:
        sensitivity_L: to any scale.
    """
    time_K = choices.time_K
    choice_L = np.zeros(len(sensitivity_L), dtype=np.int64)
    left = len(choice_L) * (choices.base_time * (1.0 + 1e-9) - time_K[0])
    order = np.argsort(-sensitivity_L, kind="stable")
    for layer in order:
        affordable = int(np.searchsorted(time_K - time_K[0], left, side="right"))
        choice_L[layer] = max(affordable - 1, 0)
        left -= time_K[choice_L[layer]] - time_K[0]
    while True:
        raised = False
        for layer in order[choice_L[order] < len(time_K) - 1]:
            more = time_K[choice_L[layer] + 1] - time_K[choice_L[layer]]
            if more <= left:
                choice_L[layer] += 1
                left -= more
                raised = True
        if not raised:
            return choices.budget_K[choice_L]


def _held_back(sensitivity_L: np.ndarray, base_L: np.ndarray) -> Sequence[str]:
    """A line about layers that read less than less sensitive ones of other pipeline stages."""
    behind = [
        layer
        for layer, budget in enumerate(base_L)
        if base_L[sensitivity_L < sensitivity_L[layer]].max(initial=0) > budget + 1
    ]
    if not behind:
        return ()
    return (
        f"layers {', '.join(map(str, behind))} read less than less sensitive layers of other "
        "pipeline stages, for which steps would wait: give their stages fewer layers "
        f"(--pipeline-model-parallel-layout), or name budgets by {flag_name('layer_budgets')}",
    )
