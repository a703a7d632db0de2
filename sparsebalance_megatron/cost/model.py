# SPDX-License-Identifier: Apache-2.0
"""The cost model: ms of every part of the model, affine in a micro-batch's features.

Affine costs add up over documents, never fall when a feature grows, and extrapolate sensibly to
lengths that were not measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from sparsebalance_megatron.config import (
    DEFAULT_COUNTED_DEVICE,
    DEFAULT_SELECTION,
    CountedDevice,
    flag_name,
)
from sparsebalance_megatron.cost.exchange import Exchange, ms_per_byte
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.segments import SegmentCost
from sparsebalance_megatron.cost.table import CostTableError, ModelShape
from sparsebalance_megatron.cost.work_model import WorkModel, work_model_named

_ATTENTION_RECOMPUTE = frozenset({Part.ATTENTION, Part.DENSE_ATTENTION, Part.ROUTER})
_FULL_RECOMPUTE = _ATTENTION_RECOMPUTE | {Part.LINEAR}
_NOTHING: frozenset[Part] = frozenset()

COUNTED = "counted operations"
"""How the source of a model begins that measured nothing."""
PEAK_FLOPS_PER_MS: Mapping[CountedDevice, float] = {
    "a100": 312e9,
    "h100": 989e9,
    "h200": 989e9,
    "b200": 2250e9,
}
"""Dense BF16, NVIDIA's data sheets."""
LINEAR_EFFICIENCY = 0.5
ATTENTION_EFFICIENCY = 0.3
"""Share of the peak that projections, and attention and router, are taken to reach."""


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """ms per unit of every feature, in the order of :data:`.features.FEATURES`, never negative.

    ``source`` says where the numbers come from, ``work`` how many block pairs the selection
    computes, ``exchange`` what it costs that ranks share a micro-batch, ``segments`` that it passes
    the pipeline in segments. Parts of a layer are per layer.
    """

    block_size: int
    forward_ms: Mapping[Part, tuple[float, ...]]
    backward_ms: Mapping[Part, tuple[float, ...]]
    source: str
    work: WorkModel = field(default_factory=lambda: work_model_named(DEFAULT_SELECTION), repr=False)
    exchange: Exchange = field(default=Exchange())
    segments: SegmentCost = field(default=SegmentCost())

    def _of(self, direction: Direction) -> Mapping[Part, tuple[float, ...]]:
        return self.forward_ms if direction is Direction.FORWARD else self.backward_ms

    def coefficients_ms(self, part: Part, direction: Direction) -> np.ndarray:
        """[5] ms per unit of every feature.

        Raises:
            CostTableError: nothing is known of the part.
        """
        if part not in self._of(direction):
            raise CostTableError(
                f"{self.source}: nothing was measured of {part}, which "
                f"{flag_name('layer_budgets')} asks for; measure again with `sparse-balance "
                "profile` and that flag"
            )
        return np.array(self._of(direction)[part], dtype=np.float64)

    def with_recompute(
        self, *, full: bool, attention_only: bool, attention_kept: bool = False
    ) -> CostModel:
        """A model whose backward contains the forward that activation recomputation repeats.

        Args:
            full: ``--recompute-granularity full``: whole layers.
            attention_only: selective recomputation of ``core_attn``: routing and attention.
            attention_kept: routing and attention of the forward serve the recomputed pass too.
        """
        repeated = _FULL_RECOMPUTE if full else _ATTENTION_RECOMPUTE if attention_only else _NOTHING
        if attention_kept:
            repeated -= _ATTENTION_RECOMPUTE
        backward_ms = dict(self.backward_ms)
        for part in repeated & backward_ms.keys():
            pairs = zip(self.backward_ms[part], self.forward_ms[part], strict=True)
            backward_ms[part] = tuple(backward + forward for backward, forward in pairs)
        return replace(self, backward_ms=backward_ms)

    def with_frozen_weights(self) -> CostModel:
        """A model whose weights take no gradients: of low-rank adapters (LoRA), say.

        Backward of a projection is two products as large as its forward, one for its input and one
        for its weights; the second falls away, and with it half the backward of the linear parts
        and the head, and all of the embedding's. Attention has no weights. The adapters' own
        products are left out: they are smaller by their rank over the hidden size.
        """
        kept = {Part.LINEAR: 0.5, Part.HEAD: 0.5, Part.EMBEDDING: 0.0}
        backward_ms = {
            part: tuple(kept.get(part, 1.0) * value for value in row)
            for part, row in self.backward_ms.items()
        }
        return replace(self, backward_ms=backward_ms)

    def with_bandwidth(self, gigabytes_per_second: float | None) -> CostModel:
        """A model whose ranks receive keys and values at one bandwidth, at every cp_size; itself
        where that is None."""
        if gigabytes_per_second is None:
            return self
        rate = ms_per_byte(gigabytes_per_second)
        exchange = replace(self.exchange, ms_per_byte=rate, cp_size_slowness=())
        return replace(self, exchange=exchange)

    @classmethod
    def analytic(
        cls,
        shape: ModelShape,
        block_size: int,
        *,
        selection: str = DEFAULT_SELECTION,
        device: CountedDevice = DEFAULT_COUNTED_DEVICE,
    ) -> CostModel:
        """Counted operations over a device's rates, where nothing was measured.

        Counts matrix multiplications, twice per multiply-add, of one tensor-parallel rank.
        Backward is 2x the forward of a projection and 2.5x of attention (five products for two).

        """
        flops_per_ms = PEAK_FLOPS_PER_MS[device] * LINEAR_EFFICIENCY
        work = work_model_named(selection)
        heads, groups, head_dim = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
        scores = work.scores_per_visible_pair(heads, groups, block_size)
        share = 1.0 / shape.tensor_parallel_size
        # Operations by the feature that they are counted per, in the order of FEATURES.
        of_pair = 2.0 * heads * (head_dim + shape.value_dim) * block_size**2 * share
        counted = {
            Part.ATTENTION: (0.0, 0.0, 0.0, of_pair, 0.0),
            Part.DENSE_ATTENTION: (0.0, 0.0, 0.0, 0.0, of_pair),
            Part.ROUTER: (
                *(0.0, 0.0, head_dim * (heads + groups) * share),
                *(0.0, 2.0 * scores * head_dim * share),
            ),
            Part.LINEAR: (0.0, 0.0, 2.0 * shape.layer_weights * share, 0.0, 0.0),
            Part.EMBEDDING: (0.0, 0.0, float(shape.hidden_size), 0.0, 0.0),
            Part.HEAD: (0.0, 0.0, 2.0 * shape.vocabulary_weights * share, 0.0, 0.0),
        }
        slowness = dict.fromkeys(_ATTENTION_RECOMPUTE, LINEAR_EFFICIENCY / ATTENTION_EFFICIENCY)
        backward = {Part.ROUTER: 0.0, Part.EMBEDDING: 1.0}
        backward |= dict.fromkeys((Part.ATTENTION, Part.DENSE_ATTENTION), 2.5)
        forward_ms, backward_ms = (
            {
                part: tuple(
                    slowness.get(part, 1.0) * (factor.get(part, default) * (count / flops_per_ms))
                    for count in counts
                )
                for part, counts in counted.items()
            }
            for factor, default in ((dict[Part, float](), 1.0), (backward, 2.0))
        )
        return cls(
            block_size=block_size,
            forward_ms=forward_ms,
            backward_ms=backward_ms,
            work=work,
            exchange=exchange_of(shape),
            source=f"{COUNTED} on {device.upper()}, {LINEAR_EFFICIENCY:.0%} of peak in "
            f"projections, {ATTENTION_EFFICIENCY:.0%} in attention",
        )


def exchange_of(shape: ModelShape, dtype: str = "bfloat16") -> Exchange:
    """Cost of micro-batches that ranks share, at the nominal bandwidth."""
    kv_heads = max(1, shape.num_query_groups // shape.tensor_parallel_size)
    return Exchange.of(kv_heads * (shape.head_dim + shape.value_dim), dtype)
