# SPDX-License-Identifier: Apache-2.0
"""Layer costs of public models, and what coverage to expect before any was observed.

Shape legend: L layers, U length buckets, K budgets of the grid.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sparsebalance_megatron.config import Granularity
from sparsebalance_megatron.cost.model import CostModel, Part
from sparsebalance_megatron.cost.table import CostTable, ModelShape
from sparsebalance_megatron.cost.table_doubts import doubts
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.simulate.lengths import WorkloadError

H200_PEAK_FLOPS_PER_MS = 989e9
"""Dense BF16, NVIDIA's data sheet."""
LINEAR_EFFICIENCY = 0.5
ATTENTION_EFFICIENCY = 0.3
COVERAGE_EXPONENT = 0.35


@dataclass(frozen=True, kw_only=True)
class ModelPreset:
    """Sizes of a public model, from its config.json."""

    layers: int
    shape: ModelShape


def _preset(
    *, layers: int, hidden: int, ffn: int, heads: int, groups: int, head_dim: int, vocabulary: int
) -> ModelPreset:
    shape = ModelShape(
        hidden_size=hidden,
        ffn_hidden_size=ffn,
        num_attention_heads=heads,
        num_query_groups=groups,
        head_dim=head_dim,
        vocab_size=vocabulary,
        gated_linear_unit=True,
        tensor_parallel_size=1,
    )
    return ModelPreset(layers=layers, shape=shape)


MODELS: Mapping[str, ModelPreset] = {
    "qwen2.5-0.5b": _preset(
        layers=24, hidden=896, ffn=4864, heads=14, groups=2, head_dim=64, vocabulary=151936
    ),
    "qwen2.5-3b": _preset(
        layers=36, hidden=2048, ffn=11008, heads=16, groups=2, head_dim=128, vocabulary=151936
    ),
    "qwen2.5-7b": _preset(
        layers=28, hidden=3584, ffn=18944, heads=28, groups=4, head_dim=128, vocabulary=152064
    ),
    "llama-3.1-8b": _preset(
        layers=32, hidden=4096, ffn=14336, heads=32, groups=8, head_dim=128, vocabulary=128256
    ),
}


def preset(name: str) -> ModelPreset:
    """A public model by name.

    Raises:
        WorkloadError: the name is unknown.
    """
    if name not in MODELS:
        raise WorkloadError(f"model {name!r} is not one of {', '.join(MODELS)}")
    return MODELS[name]


def h200_cost(name: str, *, block_size: int, tensor_parallel_size: int = 1) -> CostModel:
    """:func:`h200_cost_of` a public model whose query heads select for themselves, as MoBA's do.

    Raises:
        WorkloadError: the name is unknown.
    """
    shape = replace(preset(name).shape, tensor_parallel_size=tensor_parallel_size)
    return h200_cost_of(name, shape, block_size=block_size, selection="token-query-head")


def h200_cost_of(
    name: str, shape: ModelShape, *, block_size: int, selection: Granularity
) -> CostModel:
    """Counted operations at the H200's peak, half of it for projections, 30 % for attention.

    Args:
        name: of the model, for the source that the costs name.
    """
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
        source=f"{name}: counted operations on an H200, {LINEAR_EFFICIENCY:.0%} of peak in "
        f"projections, {ATTENTION_EFFICIENCY:.0%} in attention",
    )


def cost_of(
    model: str,
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
        heads = preset(model).shape.num_attention_heads
        if heads % tensor_parallel_size:
            raise WorkloadError(
                f"--tp {tensor_parallel_size}: must divide the {heads} heads of {model}"
            )
        cost = h200_cost(model, block_size=block_size, tensor_parallel_size=tensor_parallel_size)
        return cost, layers or preset(model).layers
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
