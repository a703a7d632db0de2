# SPDX-License-Identifier: Apache-2.0
"""Sizes of a mixture of experts, and what sending tokens to experts takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from sparsebalance_megatron.cost.exchange import NOMINAL_GIGABYTES_PER_SECOND, ms_per_byte
from sparsebalance_megatron.errors import ConfigError

_Size = Annotated[int, Meta(ge=1, le=2**40)]

RANKS_PER_NODE = 8
NODE_GIGABYTES_PER_SECOND = 150.0
"""A rank receives tokens at this rate inside a node: about what DeepEP reports for 8 ranks on an
H800 (github.com/deepseek-ai/DeepEP, README)."""
_HALF = 2
"""Bytes of a number in bfloat16."""


@dataclass(frozen=True, kw_only=True)
class ExpertShape:
    """Experts of a model; every expert is taken to get as many tokens as the others.

    Attributes:
        experts: routed experts of a layer.
        top_k: routed experts that a token takes.
        ffn_hidden_size: of one routed expert.
        shared_ffn_hidden_size: of a layer's shared experts together; 0 without them.
        layers_share: of the model's layers, those that have experts. The others have a dense MLP.
    """

    experts: _Size
    top_k: _Size
    ffn_hidden_size: _Size
    shared_ffn_hidden_size: Annotated[int, Meta(ge=0, le=2**40)] = 0
    layers_share: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0

    def __post_init__(self) -> None:
        if self.top_k > self.experts:
            raise ConfigError(
                f"--moe-router-topk {self.top_k}: a token takes at most all experts of a layer; "
                f"use at most --num-experts {self.experts}"
            )


def exchange_ms_per_token(
    *,
    hidden_size: int,
    top_k: int,
    ranks: int,
    tensor_parallel_size: int,
    gigabytes_per_second: float | None = None,
) -> float:
    """Ms per token and layer of one direction: tokens go to their experts' ranks and come back.

    Ranks of a node exchange at :data:`NODE_GIGABYTES_PER_SECOND`, others at the nominal rate of a
    network card. Nothing is taken to overlap, and no token that two experts of a rank take is
    counted once.

    Args:
        ranks: of the expert-parallel group.
        gigabytes_per_second: in place of both rates.
    """
    one_node = ranks * tensor_parallel_size <= RANKS_PER_NODE
    rate = NODE_GIGABYTES_PER_SECOND if one_node else NOMINAL_GIGABYTES_PER_SECOND
    sent_bytes = _HALF * hidden_size * top_k / tensor_parallel_size * (ranks - 1) / ranks
    return 2 * sent_bytes * ms_per_byte(gigabytes_per_second or rate)
