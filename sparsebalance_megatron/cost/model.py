# SPDX-License-Identifier: Apache-2.0
"""The cost model: ms of every part of the model, affine in a micro-batch's features.

Affine costs add up over documents, never fall when a feature grows, and extrapolate sensibly to
lengths that were not measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sparsebalance_megatron.config import (
    DEFAULT_COUNTED_DEVICE,
    DEFAULT_SELECTION,
    AttentionImplementation,
    CountedDevice,
    DenseAttention,
)
from sparsebalance_megatron.cost.exchange import Exchange, exchange_ms_per_token, ms_per_byte
from sparsebalance_megatron.cost.parts import Direction, Part, SegmentCost
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.cost.work_model import (
    TOKEN_QUERY_HEAD,
    WorkModel,
    by_feature,
    work_model_named,
)

_ATTENTION_RECOMPUTE = frozenset({Part.ATTENTION, Part.DENSE_ATTENTION, Part.ROUTER})
_FULL_RECOMPUTE = _ATTENTION_RECOMPUTE | {Part.LINEAR, Part.EXPERTS}

_BACKWARD_OVER_FORWARD = {
    **dict.fromkeys((Part.ATTENTION, Part.DENSE_ATTENTION), 2.5),
    **{Part.ROUTER: 0.0, Part.LINEAR: 2.0, Part.EMBEDDING: 1.0, Part.HEAD: 2.0},
}
"""Operations: a projection's backward is two products as large as its forward, attention's five
products for two."""

_FORWARD_AND_BACKWARD = 3


class CountedRates(NamedTuple):
    """``flops_per_ms``: dense bfloat16 products. ``memory_gib``: what a driver shows as total."""

    flops_per_ms: float
    memory_gib: float


DEVICES: Mapping[CountedDevice, CountedRates] = {
    "a100": CountedRates(312e9, 80.0),
    "h100": CountedRates(989e9, 80.0),
    "h200": CountedRates(989e9, 140.0),
    "b200": CountedRates(2250e9, 179.0),
}
"""NVIDIA's data sheets. An H200 multiplies as fast as an H100 and has more memory."""


def counted_rates(device: str) -> CountedRates | None:
    """Rates of a device by the name that it gives itself; None where that names none of these.

    >>> counted_rates("NVIDIA H100 80GB HBM3").memory_gib
    80.0
    """
    words = device.lower().replace("-", " ").split()
    return next((rates for name, rates in DEVICES.items() if name in words), None)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a device's peak that products reach, forward and backward together.

    Attributes:
        dense: dense attention by torch's FlashAttention-2: 0.33 on an H200 (research/kernels.md).
            Where the model's own attention runs it is :data:`OF_MODEL_ATTENTION`, where
            FlashAttention-4 will, :data:`OF_FLASH_ATTENTION_4`.
        sparse: block-sparse attention and its router. Measured at 65,536 tokens and budget 32, head
            dim 128 (research/kernels.md): 0.13 where every token has lists of its own, on an H200.
        linear: projections, dense MLPs, shared experts and the head. Assumed; it leaves room for
            norms and activations, which are not counted.
        experts: products of routed experts, which are small. Assumed.
    """

    dense: float = 0.33
    sparse: float = 0.13
    linear: float = 0.5
    experts: float = 0.4

    def __str__(self) -> str:
        return f"sparse attention {self.sparse:.0%}, {self.without_selection}"

    @property
    def without_selection(self) -> str:
        """The shares that a job without block-sparse attention has."""
        return (
            f"dense attention {self.dense:.0%}, linear {self.linear:.0%}, experts "
            f"{self.experts:.0%} of peak"
        )


DEFAULT_EFFICIENCY = Efficiency()
OF_BLOCK_LISTS = Efficiency(sparse=0.35)
"""Where queries of a block share a list: 0.34 to 0.39 on an H100, without the router."""

OF_MODEL_ATTENTION = 0.58
"""Share of the peak of the model's own dense attention, cuDNN's, on an H200: 0.56 to 0.62."""
OF_FLASH_ATTENTION_4 = 0.6
"""Share of the peak of FlashAttention-4. Not measured here: 0.69 forward and 0.62 backward are
published for an H200 (Dao-AILab/flash-attention, issue 2878)."""


def selection_efficiency(work: WorkModel, block_size: int) -> Efficiency:
    """Shares of the peak that are counted for a selection: that of shared lists where fewer than
    one entry a token makes a list of one block for one head."""
    entries = work.list_entries_per_token(heads=1, groups=1, block_size=block_size, budget_blocks=1)
    return OF_BLOCK_LISTS if entries < 1 else DEFAULT_EFFICIENCY


@dataclass(frozen=True, kw_only=True)
class CostModel:
    """Costs of a model.

    ``ms_per_unit``: of every feature, in the order of :data:`.FEATURES`; parts of a layer per
    layer, and nothing where a part is not timed. ``source``: where the numbers come from.
    ``efficiency``: at which operations were counted; None where they were measured.
    ``list_kernel``, ``dense_kernel``: by which attention to lists, and dense attention, was
    measured, if it was.
    """

    block_size: int
    ms_per_unit: Mapping[tuple[Part, Direction], tuple[float, ...]]
    source: str
    work: WorkModel = field(default_factory=lambda: work_model_named(DEFAULT_SELECTION), repr=False)
    exchange: Exchange = field(default=Exchange())
    segments: SegmentCost = field(default=SegmentCost())
    efficiency: Efficiency | None = None
    list_kernel: AttentionImplementation = "auto"
    dense_kernel: DenseAttention | None = None
    device: str = "an unknown device"

    def coefficients_ms(self, part: Part, direction: Direction) -> np.ndarray:
        """[5] ms per unit of every feature; zeros for what is not timed."""
        return np.array(self.ms_per_unit.get((part, direction), by_feature({})), dtype=np.float64)

    def with_recompute(self, *, full: bool, attention_only: bool) -> "CostModel":
        """A model whose backward contains the forward, and what it exchanges, that activation
        recomputation repeats.

        Args:
            full: ``--recompute-granularity full``: whole layers.
            attention_only: selective recomputation of ``core_attn``: routing and attention.
        """
        if not (full or attention_only):
            return self
        repeated = _FULL_RECOMPUTE if full else _ATTENTION_RECOMPUTE
        ms_per_unit = dict(self.ms_per_unit)
        for part in repeated:
            both_F = np.add(*(self.coefficients_ms(part, direction) for direction in Direction))
            ms_per_unit[part, Direction.BACKWARD] = tuple(both_F.tolist())
        exchange = replace(self.exchange, repeated=True)
        return replace(self, ms_per_unit=ms_per_unit, exchange=exchange)

    def with_frozen_weights(self) -> "CostModel":
        """A model whose weights take no gradients, as under low-rank adapters (LoRA).

        Backward of a projection is two products as large as its forward, one for its input and one
        for its weights; the second falls away. The adapters' own products are left out: they are
        smaller by their rank over the hidden size.
        """
        ms_per_unit = dict(self.ms_per_unit)
        for part, kept in ((Part.LINEAR, 0.5), (Part.HEAD, 0.5), (Part.EMBEDDING, 0.0)):
            row = ms_per_unit[part, Direction.BACKWARD]
            ms_per_unit[part, Direction.BACKWARD] = tuple(kept * value for value in row)
        return replace(self, ms_per_unit=ms_per_unit)

    def with_bandwidth(self, gigabytes_per_second: float | None) -> "CostModel":
        """A model whose ranks receive keys and values at one bandwidth at every cp_size, if any."""
        if gigabytes_per_second is None:
            return self
        rate = ms_per_byte(gigabytes_per_second)
        exchange = replace(self.exchange, ms_per_byte=rate, cp_size_slowness=())
        return replace(self, exchange=exchange)

    @property
    def with_model_attention(self) -> "CostModel":
        """A model whose dense attention is counted as the model's own, but in segments; as it is
        where measured."""
        if self.efficiency is None or self.efficiency.dense == OF_MODEL_ATTENTION:
            return self
        counted, own = self.efficiency, replace(self.efficiency, dense=OF_MODEL_ATTENTION)
        ms_per_unit = dict(self.ms_per_unit)
        for direction in Direction:
            row = ms_per_unit[Part.DENSE_ATTENTION, direction]
            own_ms = tuple(value * counted.dense / own.dense for value in row)
            ms_per_unit[Part.DENSE_ATTENTION, direction] = own_ms
        return replace(
            self,
            ms_per_unit=ms_per_unit,
            segments=replace(
                self.segments,
                dense_slowness=self.segments.dense_slowness * own.dense / counted.dense,
            ),
            efficiency=own,
            source=self.source.replace(str(counted), str(own)),
        )

    @classmethod
    def analytic(
        cls,
        shape: ModelShape,
        block_size: int,
        *,
        selection: str = DEFAULT_SELECTION,
        device: CountedDevice = DEFAULT_COUNTED_DEVICE,
        efficiency: Efficiency | None = None,
        expert_parallel_size: int = 1,
        gigabytes_per_second: float | None = None,
    ) -> "CostModel":
        """Counted operations over a device's rates, where nothing was measured.

        Counts matrix multiplications, twice per multiply-add, of one tensor-parallel rank.

        Args:
            efficiency: None takes the selection's, and torch's own dense attention.
            gigabytes_per_second: at which tokens reach their experts; None takes the nominal rates.
        """
        work = work_model_named(selection)
        efficiency = efficiency or selection_efficiency(work, block_size)
        heads, groups, head_dim = shape.num_attention_heads, shape.num_query_groups, shape.head_dim
        scores = work.scores_per_visible_pair(heads, groups, block_size)
        share = 1.0 / shape.tensor_parallel_size
        of_pair = 2.0 * heads * (head_dim + shape.value_dim) * block_size**2 * share
        of_router = {
            "tokens": head_dim * (heads + groups) * share,
            "visible_block_pairs": 2.0 * scores * head_dim * share,
        }
        # Operations by feature, and the share of the peak that they reach.
        counted: dict[Part, tuple[Mapping[str, float], float]] = {
            Part.ATTENTION: ({"block_pairs": of_pair}, efficiency.sparse),
            Part.DENSE_ATTENTION: ({"visible_block_pairs": of_pair}, efficiency.dense),
            Part.ROUTER: (of_router, efficiency.sparse),
            Part.LINEAR: ({"tokens": 2.0 * shape.layer_weights * share}, efficiency.linear),
            Part.EMBEDDING: ({"tokens": shape.hidden_size}, efficiency.linear),
            Part.HEAD: ({"tokens": 2.0 * shape.vocabulary_weights * share}, efficiency.linear),
        }
        peak = DEVICES[device].flops_per_ms
        ms_per_unit = {}
        for part, (counts, reached) in counted.items():
            row = tuple(count / (peak * reached) for count in by_feature(counts))
            ms_per_unit[part, Direction.FORWARD] = row
            backward = tuple(_BACKWARD_OVER_FORWARD[part] * value for value in row)
            ms_per_unit[part, Direction.BACKWARD] = backward
        if shape.experts is not None:
            operations = 2.0 * shape.routed_weights(shape.experts.top_k) * share
            products_ms = operations / (peak * efficiency.experts)
            sent_ms = exchange_ms_per_token(shape, expert_parallel_size, gigabytes_per_second)
            for direction, factor in zip(Direction, (1.0, 2.0), strict=True):
                token_ms = factor * products_ms + sent_ms
                ms_per_unit[Part.EXPERTS, direction] = by_feature({"tokens": token_ms})
        return cls(
            block_size=block_size,
            ms_per_unit=ms_per_unit,
            work=work,
            exchange=Exchange.of(shape),
            source=f"counted operations of {selection} on {device.upper()}, {efficiency}",
            efficiency=efficiency,
            device=device.upper(),
        )


def attended_token_pairs(
    tokens: ArrayLike, budget_blocks: ArrayLike, block_size: int
) -> np.ndarray:
    """(query, key) pairs of a document whose queries may read ``budget_blocks`` KV blocks, without
    those that causality masks.

    A budget of infinity is dense. Blocks are a power of two of tokens, so that the result is exact.
    """
    tokens = np.asarray(tokens, dtype=np.int64)
    whole_blocks, tail = np.divmod(tokens, block_size)
    masked = whole_blocks * (block_size * (block_size - 1) // 2) + tail * (tail - 1) // 2
    pairs = TOKEN_QUERY_HEAD.attended_pairs(tokens / block_size, budget_blocks) * block_size**2
    return pairs - masked


def training_flops(
    shape: ModelShape,
    *,
    layers: int,
    lengths_tokens_S: ArrayLike,
    budgets_LS: np.ndarray | None,
    block_size: int,
) -> float:
    """Operations of matrix multiplications, forward and backward, of the whole model over some
    documents: two per multiply-add. Recomputation and routing do not count.

    Args:
        layers: of the whole model.
        budgets_LS: None is dense causal attention.
    """
    lengths_S = np.asarray(lengths_tokens_S, dtype=np.int64)
    budgets = np.full((layers, 1), np.inf) if budgets_LS is None else budgets_LS
    pairs = int(attended_token_pairs(lengths_S, budgets, block_size).sum())
    top_k = shape.experts.top_k if shape.experts else 0
    layer = shape.layer_weights + shape.routed_weights(top_k)
    per_token = 2 * (layers * layer + shape.vocabulary_weights)
    attention = 2 * shape.num_attention_heads * (shape.head_dim + shape.value_dim) * pairs
    return float(_FORWARD_AND_BACKWARD * (per_token * int(lengths_S.sum()) + attention))


@dataclass(frozen=True, kw_only=True)
class StageScales:
    """Factors on the predicted forward and backward ms of every stage and chunk; read-only arrays.

    ``slowness_RP``: factors on top, of every data-parallel rank's device in a stage; R is 1 where
    all are alike. ``cut_ratio``: factor on top, of micro-batches in segments.
    """

    scales_2PV: np.ndarray
    slowness_RP: np.ndarray
    cut_ratio: float = 1.0

    @classmethod
    def ones(cls, stages: int, virtual_stages: int = 1) -> "StageScales":
        """Predictions as the cost model makes them."""
        return cls.of(np.ones((2, stages, virtual_stages)))

    @classmethod
    def of(
        cls, scales_2PV: np.ndarray, slowness_RP: np.ndarray | None = None, cut_ratio: float = 1.0
    ) -> "StageScales":
        """Scales from copies of arrays; without slowness, all devices are alike."""
        if slowness_RP is None:
            slowness_RP = np.ones((1, scales_2PV.shape[1]))
        return cls(
            scales_2PV=_read_only(scales_2PV),
            slowness_RP=_read_only(slowness_RP),
            cut_ratio=cut_ratio,
        )

    @property
    def factors_2RPV(self) -> np.ndarray:
        """All factors on predicted times; R may be 1."""
        return self.scales_2PV[:, None] * self.slowness_RP[..., None]


def _read_only(values: np.ndarray) -> np.ndarray:
    copied = np.array(values, dtype=np.float64)
    copied.setflags(write=False)
    return copied
