# SPDX-License-Identifier: Apache-2.0
"""What config.json says, and what is refused; tests/bad_inputs/test_models.py has single keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from convert.tiny_models import VARIANTS, tiny_config
from transformers import AutoConfig

from sparsebalance_megatron.convert.hf_config import Rope, read_config
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
QWEN3 = LLAMA | {"model_type": "qwen3", "head_dim": 128}
EXPERTS = QWEN3 | {
    "model_type": "qwen3_moe",
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
}
DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 1000000.0}


def write(directory: Path, config: Any) -> Path:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def stretching(rope: Rope) -> tuple[Any, ...]:
    return rope.rope_type, rope.rope_theta, rope.factor, rope.original_max_position_embeddings


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_model_is_what_transformers_makes_of_the_same_file(variant: str, tmp_path: Path) -> None:
    config = tiny_config(variant, dtype="bfloat16")
    config.save_pretrained(tmp_path)
    model = read_config(tmp_path)
    for key in (
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps"),
        *("tie_word_embeddings", "attention_dropout"),
    ):
        assert getattr(model, key) == getattr(config, key), key
    assert model.head_dim == getattr(config, "head_dim", 16)
    if model.model_type == "qwen3_moe":
        for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size"):
            assert getattr(model, key) == getattr(config, key), key
        assert model.norm_topk_prob == config.norm_topk_prob
    assert model.weights_dtype == torch.bfloat16
    for key in ("rope_theta", "rope_type", "factor"):
        assert getattr(model.rope, key) == config.rope_parameters.get(key), key


def test_defaults_of_absent_keys(tmp_path: Path) -> None:
    model = read_config(write(tmp_path, LLAMA))
    assert (model.head_dim, model.rms_norm_eps) == (128, 1e-6)
    assert (model.rope.rope_type, model.rope.rope_theta) == ("default", 10000)
    assert (model.tie_word_embeddings, model.has_qkv_bias, model.weights_dtype) == (
        *(False, False),
        None,
    )
    without_groups = {key: LLAMA[key] for key in LLAMA if key != "num_key_value_heads"}
    assert read_config(write(tmp_path, without_groups)).num_key_value_heads == 32
    with pytest.raises(ConvertError, match="num_key_value_heads"):
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
    assert stretching(model.rope) == ("llama3", 500000, 8.0, 8192)
    assert model.weights_dtype == torch.float16


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
        {
            "rope_theta": 1e6,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
            "rope_scaling": {"type": "linear", "factor": 4.0},
        },
    ],
)
def test_linear_stretching_and_base_in_every_spelling(rope: dict[str, Any], tmp_path: Path) -> None:
    """And `transformers` reads the same from each."""
    model = read_config(write(tmp_path, QWEN3 | rope))
    assert stretching(model.rope)[:3] == ("linear", 10**6, 4.0)
    theirs = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert (theirs["rope_type"], theirs["rope_theta"], theirs["factor"]) == ("linear", 1e6, 4.0)


@pytest.mark.parametrize("scaling", [None, {}])
def test_scaling_that_says_nothing_contradicts_nothing(scaling: Any, tmp_path: Path) -> None:
    rope = {"rope_parameters": DEFAULT_ROPE, "rope_scaling": scaling}
    assert stretching(read_config(write(tmp_path, QWEN3 | rope)).rope)[:2] == ("default", 10**6)


def test_experts_under_either_name_and_in_some_layers(tmp_path: Path) -> None:
    model = read_config(write(tmp_path, EXPERTS))
    assert (model.num_experts, set(model.expert_layers)) == (8, {True})
    renamed = {key: EXPERTS[key] for key in EXPERTS if key != "num_experts"}
    some = {"num_local_experts": 8, "decoder_sparse_step": 2, "mlp_only_layers": [1, 31]}
    model = read_config(write(tmp_path, renamed | some))
    assert model.num_experts == 8
    assert [i for i in range(32) if model.expert_layers[i]] == list(range(3, 31, 2))


def test_the_head_dim_of_qwen3_has_its_own_default(tmp_path: Path) -> None:
    small = {"hidden_size": 2048, "head_dim": None}
    assert read_config(write(tmp_path, QWEN3 | small)).head_dim == 128
    assert read_config(write(tmp_path, EXPERTS | small)).head_dim == 64


def test_yarn_without_its_optional_keys(tmp_path: Path) -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    rope = read_config(write(tmp_path, QWEN2 | {"rope_theta": 1e6, "rope_scaling": scaling})).rope
    assert stretching(rope) == ("yarn", 10**6, 4.0, 32768)
    betas = (rope.beta_fast, rope.beta_slow, rope.mscale, rope.mscale_all_dim)
    assert betas == (32.0, 1.0, 1.0, 0.0)


def test_a_window_that_is_switched_off_is_no_window(tmp_path: Path) -> None:
    off = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 28}
    assert read_config(write(tmp_path, QWEN2 | off)).model_type == "qwen2"
    assert read_config(write(tmp_path, MISTRAL)).model_type == "mistral"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "added scaling": (
        QWEN3
        | {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {"type": "linear", "factor": 4.0}},
        "rope_scaling (linear, factor 4, rope_theta 10000) contradicts rope_parameters (default, "
        "rope_theta 1000000)",
    ),
    "added yarn": (
        QWEN3
        | {"rope_parameters": DEFAULT_ROPE, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        "rope_scaling (yarn, factor 4, rope_theta 10000) contradicts rope_parameters",
    ),
    "experts of a dense family": (
        QWEN3 | {"num_experts": 8},
        "num_experts 8: qwen3 models have none",
    ),
    "experts by two names": (
        EXPERTS | {"num_local_experts": 4},
        "num_experts 8 contradicts num_local_experts 4",
    ),
    "no experts": (EXPERTS | {"num_experts": 0}, "missing required field num_experts"),
    "too many for a token": (
        EXPERTS | {"num_experts_per_tok": 9},
        "num_experts_per_tok 9: there are 8 experts",
    ),
    "one expert for a token": (
        EXPERTS | {"num_experts_per_tok": 1, "norm_topk_prob": True},
        "norm_topk_prob True",
    ),
    "experts nowhere": (
        EXPERTS | {"decoder_sparse_step": 33},
        "mlp_only_layers, decoder_sparse_step: no layer has experts",
    ),
    "too many experts": (EXPERTS | {"num_experts": 10**7}, "num_experts 10000000"),
    "too many experts in all": (
        EXPERTS | {"num_experts": 2**18},
        "num_experts 262144 x num_hidden_layers 32: 8388608 experts, more than 262144",
    ),
    "a layer that is none": (
        EXPERTS | {"mlp_only_layers": [2, 32]},
        "mlp_only_layers 32: the last of num_hidden_layers 32 is 31",
    ),
    "no layer": (EXPERTS | {"mlp_only_layers": [-1]}, "mlp_only_layers[0] -1"),
    "window of Qwen3": (QWEN3 | {"use_sliding_window": True}, "use_sliding_window True"),
    "window of Qwen2": (QWEN2 | {"use_sliding_window": True}, "use_sliding_window True"),
    "window of Mistral": (MISTRAL | {"sliding_window": 4096}, "sliding_window is 4096"),
    "default window": (LLAMA | {"model_type": "mistral"}, "sliding_window absent means 4096"),
    "llama3 constants": (
        LLAMA | {"rope_scaling": LLAMA3 | {"high_freq_factor": 2.0}},
        "high_freq_factor 2.0: Megatron has 4.0 built in",
    ),
    "llama3 positions": (
        LLAMA | {"rope_scaling": LLAMA3 | {"original_max_position_embeddings": None}},
        "original_max_position_embeddings 131072",
    ),
    "yarn's scale": (
        QWEN2 | {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.3}},
        "rope_scaling.attention_factor 1.3",
    ),
    "rope by layer": (
        QWEN2 | {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
        "unknown field full_attention",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    config, expected = REFUSED[case]
    with pytest.raises(ConvertError) as error:
        read_config(write(tmp_path, config))
    assert str(error.value).startswith(f"{tmp_path / 'config.json'}: ")
    assert expected in str(error.value)
