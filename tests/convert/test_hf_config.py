# SPDX-License-Identifier: Apache-2.0
"""What config.json says, and what is refused by the name of its key."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.tiny_models import VARIANTS, tiny_config

from sparsebalance_megatron.convert.dense_model import Rope
from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.errors import ConvertError

LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}
"""The keys that have no default."""
LLAMA3 = {
    "type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
QWEN2 = LLAMA | {"model_type": "qwen2"}
MISTRAL = LLAMA | {"model_type": "mistral", "sliding_window": None}


def write(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_is_what_transformers_makes_of_the_same_file(variant: str, tmp_path: Path) -> None:
    config = tiny_config(variant, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    model = read_config(tmp_path)
    assert (model.layers, model.hidden_size) == (config.num_hidden_layers, config.hidden_size)
    assert model.ffn_hidden_size == config.intermediate_size
    assert model.attention_heads == config.num_attention_heads
    assert model.query_groups == config.num_key_value_heads
    assert model.head_dim == getattr(config, "head_dim", 16)
    assert model.vocab_size == config.vocab_size
    assert model.max_positions == config.max_position_embeddings
    assert model.norm_epsilon == config.rms_norm_eps
    assert model.tied == config.tie_word_embeddings
    assert model.dtype == torch.bfloat16
    assert model.rope.base == config.rope_parameters["rope_theta"]
    assert model.rope.kind == config.rope_parameters["rope_type"]
    assert model.rope.factor == config.rope_parameters.get("factor", 1.0)


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    model = read_config(write(tmp_path, LLAMA))
    assert (model.head_dim, model.rope, model.norm_epsilon) == (128, Rope(base=10000), 1e-6)
    assert (model.tied, model.qkv_bias, model.dtype) == (False, False, None)
    without_groups = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
    assert read_config(write(tmp_path, without_groups)).query_groups == 32
    with pytest.raises(ConvertError, match="no num_key_value_heads"):
        read_config(write(tmp_path, without_groups | {"model_type": "qwen2"}))


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 500000.0, "rope_scaling": LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_type": "llama3", "rope_theta": 500000}},
    ],
)
def test_rope_is_read_where_either_version_of_transformers_writes_it(
    rope: dict[str, Any], tmp_path: Path
) -> None:
    model = read_config(write(tmp_path, LLAMA | rope | {"torch_dtype": "float16"}))
    expected = Rope(base=500000, kind="llama3", factor=8.0, original_positions=8192)
    assert model.rope == expected
    assert model.dtype == torch.float16


def test_yarn_without_its_optional_keys(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = read_config(write(tmp_path, QWEN2 | {"rope_theta": 1e6, "rope_scaling": scaling}))
    assert model.rope == Rope(base=10**6, kind="yarn", factor=4.0, original_positions=32768)


def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path) -> None:
    off = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    assert read_config(write(tmp_path, QWEN2 | off)).family == "qwen2"
    assert read_config(write(tmp_path, MISTRAL)).family == "mistral"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "other family": (LLAMA | {"model_type": "mixtral"}, 'model_type "mixtral": supported are'),
    "experts": (LLAMA | {"model_type": "qwen2_moe"}, 'model_type "qwen2_moe"'),
    "no family": ({}, "model_type null"),
    "quantised": (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
    "activation": (LLAMA | {"hidden_act": "gelu"}, 'hidden_act "gelu"'),
    "attention bias": (LLAMA | {"attention_bias": True}, "attention_bias true"),
    "MLP bias": (LLAMA | {"mlp_bias": True}, "mlp_bias true"),
    "window of Qwen2": (QWEN2 | {"use_sliding_window": True}, "use_sliding_window true"),
    "window of Mistral": (MISTRAL | {"sliding_window": 4096}, "sliding_window 4096"),
    "default window": (LLAMA | {"model_type": "mistral"}, "sliding_window null: absent means"),
    "windows by layer": (
        QWEN2 | {"layer_types": ["full_attention", "sliding_attention"]},
        "layer_types",
    ),
    "dtype": (LLAMA | {"torch_dtype": "float8_e4m3fn"}, 'torch_dtype "float8_e4m3fn"'),
    "heads and groups": (LLAMA | {"num_key_value_heads": 5}, "num_key_value_heads 5"),
    "heads and width": (LLAMA | {"hidden_size": 4100}, "num_attention_heads 32"),
    "not a number": (LLAMA | {"hidden_size": "4096"}, 'hidden_size "4096": must be a number'),
    "fraction": (LLAMA | {"num_hidden_layers": 1.5}, "num_hidden_layers 1.5"),
    "fractional base": (LLAMA | {"rope_theta": 10000.5}, "rope_theta 10000.5"),
    "partial rotation": (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
    "rope kind": (
        LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        'rope_scaling.type "dynamic": supported are',
    ),
    "fractional stretch": (
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}},
        "rope_scaling.factor 2.5",
    ),
    "llama3 constants": (
        LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 2.0}},
        "rope_scaling.high_freq_factor 2.0: Megatron has 4.0 built in",
    ),
    "llama3 positions": (
        LLAMA | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
        "original_max_position_embeddings",
    ),
    "yarn's scale": (
        QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.3}},
        "rope_scaling.attention_factor 1.3",
    ),
    "rope by layer": (
        QWEN2 | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "rope_parameters",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    config, expected = REFUSED[case]
    with pytest.raises(ConvertError) as error:
        read_config(write(tmp_path, config))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert expected in str(error.value)


@pytest.mark.parametrize("missing", [key for key in LLAMA if key != "num_key_value_heads"])
def test_a_missing_key_is_named(missing: str, tmp_path: Path) -> None:
    config = {key: value for key, value in LLAMA.items() if key != missing}
    with pytest.raises(ConvertError, match=missing):
        read_config(write(tmp_path, config))


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_file_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConvertError, match=r"config\.json: not "):
        read_config(tmp_path)


def test_a_directory_without_the_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=r"config\.json: cannot be read \(No such file"):
        read_config(tmp_path)
