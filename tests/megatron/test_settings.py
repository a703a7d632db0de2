# SPDX-License-Identifier: Apache-2.0
"""What rows of quantised models are padded to, and that padding is nobody's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from sparsebalance_megatron.cost.table import ExpertShape
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.megatron.compat import quantized_token_multiple
from sparsebalance_megatron.megatron.settings import (
    expert_group_ranks,
    expert_shape,
    micro_batch_group_size,
    token_multiple,
)


@pytest.mark.parametrize(
    ("stages", "virtual", "given_size", "expected"),
    [(2, 2, 4, 4), (2, 2, 2, None), (2, 2, None, None), (2, None, 4, None)],
)
def test_only_groups_of_virtual_stages_that_differ_from_the_pipeline_are_named(
    stages: int, virtual: int | None, given_size: int | None, expected: int | None
) -> None:
    transformer_config = SimpleNamespace(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=given_size,
    )
    assert micro_batch_group_size(transformer_config) == expected


@pytest.mark.parametrize(
    ("experts", "expert_parallel", "expert_tensor", "tensor", "ranks"),
    [
        (None, 1, None, 2, 1),
        (8, 1, None, 1, 1),
        (8, 8, None, 1, 8),
        (8, 2, None, 4, 2),
        (8, 2, 1, 2, 1),
        (8, 4, 1, 2, 2),
        (8, 2, 1, 4, 1),
        (8, 1, 2, 1, 2),
        (6, 6, 1, 4, 3),
    ],
)
def test_an_expert_group_is_neighbouring_data_parallel_ranks(
    experts: int | None, expert_parallel: int, expert_tensor: int | None, tensor: int, ranks: int
) -> None:
    """In the last case groups are ranks 0 to 5 and 6 to 11, while ranks 4 to 7 are tensor-parallel:
    3 data-parallel ranks hang together."""
    transformer_config = SimpleNamespace(
        num_moe_experts=experts,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor,
        tensor_model_parallel_size=tensor,
    )
    assert expert_group_ranks(transformer_config) == ranks


def test_experts_are_those_of_the_layers_that_have_them() -> None:
    sizes = {"num_layers": 4, "ffn_hidden_size": 256, "moe_ffn_hidden_size": 64}
    routing = {"moe_router_topk": 2, "moe_shared_expert_intermediate_size": None}
    plain = SimpleNamespace(num_moe_experts=8, moe_layer_freq=1, **sizes, **routing)
    shape = ExpertShape(experts=8, top_k=2, ffn_hidden_size=64)
    assert expert_shape(plain) == shape
    for pattern, share in ((2, 0.5), (3, 0.5), ([0, 1, 1, 1], 0.75)):
        some = SimpleNamespace(**vars(plain) | {"moe_layer_freq": pattern})
        assert expert_shape(some) == replace(shape, layers_share=share)
    shared = {"moe_shared_expert_intermediate_size": 96, "moe_ffn_hidden_size": None}
    found = expert_shape(SimpleNamespace(**vars(plain) | shared))
    assert found == replace(shape, ffn_hidden_size=256, shared_ffn_hidden_size=96)
    assert expert_shape(SimpleNamespace(num_moe_experts=None)) is None
    assert expert_shape(SimpleNamespace(**vars(plain) | {"moe_layer_freq": [0] * 4})) is None


@pytest.mark.parametrize(
    ("differs", "complaint"),
    [
        *(({"moe_layer_freq": each}, "--moe-layer-freq") for each in (0, -1, [1], [0, 1, 2, 1])),
        ({"moe_router_topk": 9}, "--moe-router-topk 9: .* at most --num-experts 8"),
    ],
)
def test_experts_that_cannot_be_are_refused(differs: dict[str, Any], complaint: str) -> None:
    model = {"num_layers": 4, "num_moe_experts": 8, "moe_layer_freq": 1, "moe_router_topk": 2}
    model |= {"moe_ffn_hidden_size": 64, "moe_shared_expert_intermediate_size": None}
    with pytest.raises(ConfigError, match=complaint):
        expert_shape(SimpleNamespace(**model | differs))


def config(**fields: Any) -> SimpleNamespace:
    """What Megatron's rule reads of a ``TransformerConfig``."""
    plain = {"fp8": None, "fp8_recipe": "delayed", "fp4": None, "fp4_recipe": "nvfp4"}
    return SimpleNamespace(**plain | {"use_transformer_engine_op_fuser": False} | fields)


@pytest.mark.parametrize(
    ("fields", "multiple"),
    [
        ({}, 1),
        ({"use_transformer_engine_op_fuser": True}, 1),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": "e2m1"}, 128),
    ],
)
def test_the_multiple_is_megatrons(fields: dict[str, Any], multiple: int) -> None:
    assert quantized_token_multiple(config(**fields)) == multiple


def test_every_sequence_parallel_part_divides() -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    assert token_multiple(config(**parallel | {"sequence_parallel": False})) == 1
    assert token_multiple(config(**parallel)) == 2
    assert token_multiple(config(**parallel, fp8="e4m3", fp8_recipe="mxfp8")) == 64
