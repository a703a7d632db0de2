# SPDX-License-Identifier: Apache-2.0
"""Layer costs of models, and what coverage to expect before any was observed.

Shape legend: L layers, U length buckets, K budgets of the grid.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.cost.model import CostModel, Part
from sparsebalance_megatron.cost.table import CostTable
from sparsebalance_megatron.cost.table_doubts import doubts
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.presets import ModelPreset, preset

H200_PEAK_FLOPS_PER_MS = 989e9
"""Dense BF16, NVIDIA's data sheet."""
LINEAR_EFFICIENCY = 0.5
ATTENTION_EFFICIENCY = 0.3
COVERAGE_EXPONENT = 0.35


def h200_cost(
    model: str | ModelPreset,
    *,
    block_size: int,
    tensor_parallel_size: int = 1,
    selection: str = "token-query-head",
) -> CostModel:
    """Counted operations at the H200's peak, half of it for projections, 30 % for attention.

    Args:
        selection: who selects; the default is MoBA's, per token and query head.

    Raises:
        WorkloadError: the name is unknown.
    """
    model = preset(model) if isinstance(model, str) else model
    shape = replace(model.shape, tensor_parallel_size=tensor_parallel_size)
    linear = CostModel.analytic(
        shape,
        block_size,
        selection=selection,
        flops_per_ms=H200_PEAK_FLOPS_PER_MS * LINEAR_EFFICIENCY,
    )
    slower = dict.fromkeys(Part, 1.0) | dict.fromkeys(
        (Part.ATTENTION, Part.ROUTER), LINEAR_EFFICIENCY / ATTENTION_EFFICIENCY
    )
    return CostModel(
        block_size=block_size,
        forward_ms=_scaled(linear.forward_ms, slower),
        backward_ms=_scaled(linear.backward_ms, slower),
        work=linear.work,
        exchange=linear.exchange,
        source=f"{model.name}: counted operations on an H200, {LINEAR_EFFICIENCY:.0%} of peak in "
        f"projections, {ATTENTION_EFFICIENCY:.0%} in attention",
    )


def cost_of(
    model: str | ModelPreset,
    *,
    cost_table: Path | None,
    layers: int | None,
    block_size: int,
    tensor_parallel_size: int,
) -> tuple[CostModel, int]:
    """Costs and number of layers: fitted to a measured table, or else of a public model.

    Raises:
        CostTableError: the table cannot be used.
        WorkloadError: the number of layers is missing or wrong.
    """
    if layers is not None and layers < 1:
        raise WorkloadError(f"--layers {layers}: at least 1 needed")
    if cost_table is None:
        model = preset(model) if isinstance(model, str) else model
        heads = model.shape.num_attention_heads
        if heads % tensor_parallel_size:
            raise WorkloadError(
                f"--tp {tensor_parallel_size}: must divide the {heads} heads of {model.name}"
            )
        cost = h200_cost(model, block_size=block_size, tensor_parallel_size=tensor_parallel_size)
        return cost, layers or model.layers
    if layers is None:
        raise WorkloadError(f"--cost-table {cost_table}: costs are per layer; add --layers")
    table = CostTable.load(cost_table)
    cost = CostModel.fit(table)
    for doubt in doubts(table, cost):
        warnings.warn(doubt, stacklevel=2)
    return cost, layers


def with_bandwidth(cost: CostModel, gigabytes_per_second: float | None) -> CostModel:
    """Costs whose exchange runs at a bandwidth; None leaves it as it is.

    Raises:
        WorkloadError: the bandwidth is not finite or not above 0.
    """
    if gigabytes_per_second is None:
        return cost
    if not 0.0 < gigabytes_per_second < float("inf"):
        raise WorkloadError(
            f"--gigabytes-per-second {gigabytes_per_second}: must be finite and above 0"
        )
    return cost.with_bandwidth(gigabytes_per_second)


def _scaled(
    ms: Mapping[Part, tuple[float, ...]], factor: Mapping[Part, float]
) -> dict[Part, tuple[float, ...]]:
    return {part: tuple(factor[part] * value for value in row) for part, row in ms.items()}


def prior_coverage(layers: int, max_blocks: int) -> CoverageCurves:
    """Coverage (k / n)^0.35 of n blocks at budget k, alike in all layers; no measurement.

    A length bucket holds the curve of the geometric middle of its lengths.
    """
    curves = CoverageCurves(layers, max_blocks, 0.0)
    middle_U = 2.0 ** (np.arange(curves.buckets) + 0.5)
    curve_UK = np.minimum(np.asarray(curves.grid) / middle_U[:, None], 1.0) ** COVERAGE_EXPONENT
    counts_LU = np.ones_like(curves.observed_LU, dtype=np.float64)
    curves.observe(np.broadcast_to(curve_UK, curves.mean_LUK.shape), counts_LU)
    return curves
