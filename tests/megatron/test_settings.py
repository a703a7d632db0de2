# SPDX-License-Identifier: Apache-2.0
"""What rows of quantised models are padded to, and that padding is nobody's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from step_cases import SHAPE

from sparsebalance_megatron.megatron.compat import quantized_row_multiple
from sparsebalance_megatron.megatron.settings import RunSettings, micro_batch_group_size
from sparsebalance_megatron.plan.job import Job

SETTINGS = RunSettings(
    shape=replace(SHAPE, tensor_parallel_size=2),
    dtype="bfloat16",
    job=Job(stage_layers=(((0,),),), data_parallel_size=1),
    sequence_parallel=False,
    recompute_all=False,
    recompute_attention=False,
    seq_length=1024,
    micro_batch_size=1,
    global_batch_size=1,
    split="1,0,0",
    seed=1,
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
    assert quantized_row_multiple(config(**fields)) == multiple


def test_every_sequence_parallel_part_divides() -> None:
    assert SETTINGS.pad_to_multiple_of == 1
    assert replace(SETTINGS, quantized_multiple=32).pad_to_multiple_of == 32
    sequence = replace(SETTINGS, sequence_parallel=True)
    assert sequence.pad_to_multiple_of == 2
    assert replace(sequence, quantized_multiple=32).pad_to_multiple_of == 64
