# SPDX-License-Identifier: Apache-2.0
"""Budgets by layer: from one number for each layer.

Shape legend: L layers, K budgets.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pretrained.arms import UNIFORM, Arm
from pretrained.model import PretrainedError
from sparsebalance_megatron.cost.work_model import QUERY_BLOCK
from sparsebalance_megatron.layer_budgets import DENSE
from sparsebalance_megatron.plan.budgets.by_layer import budgets_by_sensitivity, pairs_by_budget

PEAKS, CUTS_TEXT, CUTS_LOOKUPS = "peaks", "cuts-text", "cuts-lookups"
REPETITIONS = "repetitions"
"""Sensitivities that are measured."""
FLOOR_SHARE = 5 / 8
"""The share of the mean budget that every layer has where the rest follows sensitivities."""
POWERS = {PEAKS: 2.0}
"""The rest is in proportion to this power of a layer's sensitivity; 1 where none is named."""


def layer_budgets(
    arm: Arm, layers: int, most: int, sensitivities: Mapping[str, Any]
) -> tuple[int, ...]:
    """Blocks by layer, or DENSE.

    ``arm.layers`` is ``uniform``; the name of sensitivities; ``dense-N-NAME``, where the N most
    sensitive layers are dense; ``least-N-NAME``, the package's rule with N blocks at least; or
    ``dense:1,2``, where these are dense.

    Args:
        most: blocks of the document; no budget is larger.
        sensitivities: name -> one number for each layer.

    Raises:
        PretrainedError: the name is unknown.
    """
    name = arm.layers
    if name == UNIFORM:
        return (arm.blocks,) * layers
    if name.startswith("dense:"):
        dense = {int(layer) for layer in name.removeprefix("dense:").split(",")}
        return tuple(DENSE if layer in dense else arm.blocks for layer in range(layers))
    source = source_of(name)
    if source not in sensitivities:
        raise PretrainedError(
            f"layers={name}: no sensitivities are called {source}; there are "
            f"{', '.join(sensitivities) or 'none'}"
        )
    known = sensitivities[source]
    if name.startswith("least-"):
        pairs_K = pairs_by_budget(np.array([float(most)]), QUERY_BLOCK)[:, 0]
        least_share = int(name.split("-")[1]) / min(arm.blocks, most)
        found_L = budgets_by_sensitivity(
            np.array(known),
            arm.blocks,
            pairs_K,
            least_share=least_share,
            own_lists=arm.pair_cost > 1.0,
        )
        return tuple(found_L.tolist())
    if name != source:
        dense_layers = int(name.split("-")[1])
        first = sorted(range(layers), key=lambda layer: -known[layer])[:dense_layers]
        return tuple(DENSE if layer in first else arm.blocks for layer in range(layers))
    return proportional(
        known,
        total=min(arm.blocks, most) * layers,
        floor=max(1 + arm.first_blocks, round(FLOOR_SHARE * arm.blocks)),
        most=most,
        power=POWERS.get(source, 1.0),
    )


def source_of(name: str) -> str | None:
    """The sensitivities that budgets by this name follow; None where they follow none."""
    if name == UNIFORM or name.startswith("dense:"):
        return None
    return name.split("-", 2)[2] if name.startswith(("dense-", "least-")) else name


def proportional(
    sensitivities: Sequence[float], *, total: int, floor: int, most: int, power: float
) -> tuple[int, ...]:
    """A floor, and the rest in proportion to a power of positive sensitivities.

    What a layer cannot use beyond ``most`` goes to the others; remainders to the largest.
    """
    layers = len(sensitivities)
    weights = [max(each, 0.0) ** power for each in sensitivities]
    capped: set[int] = set()
    while True:
        rest = total - floor * (layers - len(capped)) - most * len(capped)
        weight = sum(each for layer, each in enumerate(weights) if layer not in capped)
        exact = [
            float(most)
            if layer in capped
            else floor + (rest * each / weight if weight else rest / (layers - len(capped)))
            for layer, each in enumerate(weights)
        ]
        above = {layer for layer in range(layers) if exact[layer] > most} - capped
        if not above:
            break
        capped |= above
    budgets = [int(each) for each in exact]
    by_remainder = sorted(range(layers), key=lambda layer: budgets[layer] - exact[layer])
    for layer in by_remainder[: total - sum(budgets)]:
        budgets[layer] += 1
    return tuple(budgets)
