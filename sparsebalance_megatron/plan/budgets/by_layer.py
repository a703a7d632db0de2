# SPDX-License-Identifier: Apache-2.0
"""Base budgets by layer, from how sensitive layers are, at the time of one budget in all layers.

A few layers carry a model's look-ups: they need many blocks, the others few. Which layers do is
measured before training (``sparse-balance sensitivity``) and read here.

Shape legend: K budgets that a layer may have, X lengths of samples.
"""

from dataclasses import replace
from heapq import heapify, heappop, heappush
from pathlib import Path

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.cost.table import read_sensitivities
from sparsebalance_megatron.cost.work_model import WorkModel
from sparsebalance_megatron.layer_budgets import DENSE, dense_up_to_blocks, layer_budgets_text
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.plan.step_costs import step_costs

LEAST_SHARE = 0.625
"""What every layer keeps of the base budget, whatever its sensitivity."""
_WHOLE_LAYERS = 0.1
"""The share of the layers that read everything, where tokens have lists of their own."""
OWN_AND_FIRST = 2
"""Blocks that every query reads, whatever it selects."""


def with_layer_budgets(
    config: SparseBalanceConfig, job: Job, lengths_tokens: np.ndarray, cost: CostModel
) -> tuple[SparseBalanceConfig, tuple[str, ...]]:
    """The choices with the layer budgets that follow from the file of sensitivities, if one is
    given, and lines that say so.

    Every pipeline stage takes at most the time of the base budget in all of its layers, so that
    no step waits longer for one. Dense attention is chosen only where its cost is known.

    Args:
        lengths_tokens: of all training samples.

    Raises:
        ConfigError: see :func:`.read_sensitivities`.
    """
    if config.sensitivity is None:
        return config, ()
    sensitivity_L = read_sensitivities(Path(config.sensitivity), job.layers)
    ms_K, dense_ms = _layer_ms(config, lengths_tokens, cost)
    entries = cost.work.list_entries_per_token(
        heads=1, groups=1, block_size=config.block_size, budget_blocks=1
    )
    base_L = np.empty(job.layers, dtype=np.int64)
    for stage in job.stage_layers:
        layers = [layer for chunk in stage for layer in chunk]
        base_L[layers] = budgets_by_sensitivity(
            sensitivity_L[layers],
            config.base_budget,
            ms_K,
            dense_time=dense_ms,
            least_budget=max(OWN_AND_FIRST, 1 + (config.first_blocks or 0)),
            own_lists=entries >= 1.0,
        )
    text = layer_budgets_text({layer: int(budget) for layer, budget in enumerate(base_L)})
    line = (
        f"base budgets by sensitivity: {text}; at most the predicted attention time of "
        f"{config.base_budget} blocks in all layers"
    )
    held_back = _held_back(sensitivity_L, base_L)
    return replace(config, sensitivity=None, layer_budgets=text), (line, *held_back)


def _layer_ms(
    config: SparseBalanceConfig, lengths_tokens: np.ndarray, cost: CostModel
) -> tuple[np.ndarray, float]:
    """Predicted ms of a model of one layer over all samples: [K] at 0, 1, ... blocks, dense
    documents included, and with a dense layer, infinity where that is unknown."""
    length_X, count_X = np.unique(-(-lengths_tokens // config.block_size), return_counts=True)
    knows_dense = config.attention != "tokens"
    one_layer = Job.even(layers=1, ranks=1, stages=1)
    sparse = step_costs(length_X * config.block_size, one_layer, cost, StageScales.ones(1))

    def ms(budget: int, is_dense_X: np.ndarray) -> float:
        costs = replace(sparse, dense_LS=is_dense_X[None])
        ms_2XC = costs.sample_ms(np.full(costs.dense_LS.shape, max(budget, 1)))
        return float(ms_2XC.sum(axis=(0, 2)) @ count_X)

    longest = config.base_budget, config.dense_up_to_tokens, config.block_size
    ms_K = [
        ms(budget, knows_dense & (length_X <= dense_up_to_blocks(max(budget, 1), *longest)))
        for budget in range(max(int(length_X[-1]), 1) + 1)
    ]
    return np.array(ms_K), ms(1, length_X > 0) if knows_dense else np.inf


def pairs_by_budget(length_blocks_X: np.ndarray, work: WorkModel) -> np.ndarray:
    """[K, X] block pairs at 0, 1, ... blocks, up to those of the longest; 0 counts as 1."""
    budgets = np.arange(max(int(length_blocks_X.max()), 1) + 1).clip(1)
    return work.attended_pairs(length_blocks_X, budgets[:, None])


def budgets_by_sensitivity(
    sensitivity_L: np.ndarray,
    base_budget: int,
    time_K: np.ndarray,
    *,
    dense_time: float = np.inf,
    least_share: float = LEAST_SHARE,
    least_budget: int = OWN_AND_FIRST,
    own_lists: bool = False,
) -> np.ndarray:
    """Base budget of every layer, int64 [L], :data:`.DENSE` where lists would take as long.

    1. All layers get the least budget: a share of the base budget, rounded up, and at least
       ``least_budget``, the own and the first blocks.
    2. The most sensitive layer gets blocks until it reads everything, then the next one, as long
       as all layers together take no more time than at the base budget. What a shared list misses
       falls in proportion to its length, so that whole layers pay best (research/pretrained.md).
    3. Where tokens have lists of their own, that is for a tenth of the layers, rounded up. The
       others get time in proportion to their squared sensitivities, as far as they can use it.

    Args:
        sensitivity_L: to any scale.
        time_K: of a layer, in any unit, at 0, 1, ... blocks, up to those of the longest sample.
        dense_time: of a dense layer; infinity where it is unknown.
        own_lists: whether single tokens have lists.
    """
    base = min(base_budget, len(time_K) - 1)
    least = min(max(int(np.ceil(least_share * base)), least_budget), base)
    left = len(sensitivity_L) * time_K[base] * (1.0 + 1e-9)
    # More documents are dense at a larger budget, which may take a little less.
    time_K = np.maximum.accumulate(time_K[least:])
    budget_K = np.arange(least, least + len(time_K))[time_K < dense_time]
    time_K = time_K[: len(budget_K)]
    if np.isfinite(dense_time):
        budget_K, time_K = np.append(budget_K, DENSE), np.append(time_K, dense_time)
    choice_L = np.zeros(len(sensitivity_L), dtype=np.int64)
    left -= len(choice_L) * time_K[0]
    weight_L = (sensitivity_L / (sensitivity_L.max() or 1.0)) ** 2
    place_L = np.argsort(np.argsort(-sensitivity_L, kind="stable"))
    whole = len(place_L) * (_WHOLE_LAYERS if own_lists else 1.0)

    def next_block(layer: int) -> tuple[float, int, int]:
        """Sorts layers by who gets the next block; alike ones take turns."""
        choice, place, weight = int(choice_L[layer]), int(place_L[layer]), float(weight_L[layer])
        if weight == 0.0:
            return np.inf, choice, layer
        if place < whole:
            return 0.0, place, layer
        return float(time_K[choice + 1] - time_K[0]) / weight, choice, layer

    rising = [next_block(layer) for layer in range(len(choice_L)) if len(time_K) > 1]
    heapify(rising)
    while rising:
        layer = heappop(rising)[-1]
        more = time_K[choice_L[layer] + 1] - time_K[choice_L[layer]]
        if more <= left:
            choice_L[layer] += 1
            left -= more
            if choice_L[layer] < len(time_K) - 1:
                heappush(rising, next_block(layer))
    return budget_K[choice_L]


def _held_back(sensitivity_L: np.ndarray, base_L: np.ndarray) -> tuple[str, ...]:
    """A line about layers that read less than less sensitive ones of other pipeline stages."""
    lesser_LL = sensitivity_L < sensitivity_L[:, None]
    (behind,) = np.nonzero(np.where(lesser_LL, base_L, 0).max(axis=1) > base_L + 1)
    line = (
        f"layers {', '.join(map(str, behind))} read less than less sensitive layers of other "
        "pipeline stages, for which steps would wait: give their stages fewer layers "
        f"(--pipeline-model-parallel-layout), or name budgets by {flag_name('layer_budgets')}"
    )
    return (line,) if len(behind) else ()
