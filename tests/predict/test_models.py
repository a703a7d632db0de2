# SPDX-License-Identifier: Apache-2.0
"""Public sizes, models of a directory, counted costs, and the coverage prior."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparsebalance_megatron.predict.lengths import WorkloadError
from sparsebalance_megatron.predict.models import MODELS, model_named
from sparsebalance_megatron.predict.workload import prior_coverage

PUBLISHED_BILLIONS = {
    "qwen2.5-0.5b": 0.49,
    "qwen2.5-1.5b": 1.54,
    "qwen2.5-3b": 3.09,
    "qwen2.5-7b": 7.61,
    "qwen2.5-14b": 14.7,
    "qwen2.5-32b": 32.5,
    "qwen2.5-72b": 72.7,
    "qwen3-0.6b": 0.6,
    "qwen3-1.7b": 1.7,
    "qwen3-4b": 4.0,
    "qwen3-8b": 8.2,
    "qwen3-14b": 14.8,
    "qwen3-32b": 32.8,
    "llama-3.1-8b": 8.03,
    "llama-3.1-70b": 70.6,
    "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235,
    "deepseek-v2-lite": 15.7,
    "deepseek-v3": 671,
    "kimi-k2": 1030,
    "glm-4.5": 355,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
}
"""Sizes from the model cards and safetensors indices (Llama)."""
ACTIVATED_BILLIONS = {
    "qwen3-30b-a3b": 3.3,
    "qwen3-235b-a22b": 22,
    "deepseek-v2-lite": 2.4,
    "deepseek-v3": 37,
    "kimi-k2": 32,
    "glm-4.5": 32,
    "gpt-oss-20b": 3.6,
    "gpt-oss-120b": 5.1,
}
"""Parameters that a token takes, from the model cards."""
AS_PUBLISHED = 0.03
"""Cards round to two or three digits; biases and norms are left out here."""


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert MODELS[name].parameters / 1e9 == pytest.approx(
        PUBLISHED_BILLIONS[name], rel=AS_PUBLISHED
    )


@pytest.mark.parametrize("name", ACTIVATED_BILLIONS)
def test_a_token_takes_the_published_number_of_parameters(name: str) -> None:
    model, shape = MODELS[name], MODELS[name].shape
    assert shape.experts is not None
    layer = shape.layer_weights + shape.routed_weights(shape.experts.top_k)
    least, most = (model.layers * layer + many * shape.vocabulary_weights for many in (1, 2))
    # Cards differ in whether they count the embedding, of which a token takes one row.
    published = ACTIVATED_BILLIONS[name] * 1e9
    assert least * (1 - AS_PUBLISHED) <= published <= most * (1 + AS_PUBLISHED)


CONFIG = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


def write_config(directory: Path, **changes: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    return directory


def test_a_directory_is_read_as_its_preset_is_written(tmp_path: Path) -> None:
    found = model_named(str(write_config(tmp_path / "llama-3.1-8b")))
    assert found == MODELS["llama-3.1-8b"]
    qwen3 = write_config(tmp_path / "other", head_dim=64, num_key_value_heads=None)
    shape = model_named(str(qwen3)).shape
    assert (shape.head_dim, shape.num_query_groups) == (64, 32)


QWEN3_30B = {
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V3 = {
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("name", "config"), [("qwen3-30b-a3b", QWEN3_30B), ("deepseek-v3", DEEPSEEK_V3)]
)
def test_experts_are_read_as_their_preset_is_written(
    tmp_path: Path, name: str, config: dict[str, object]
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for given in (folder, folder / "config.json"):
        assert model_named(str(given)) == MODELS[name]


def test_layers_without_experts_are_those_that_the_config_names(tmp_path: Path) -> None:
    others = {"decoder_sparse_step": 2, "mlp_only_layers": [1, 3]}
    path = write_config(tmp_path, **{"num_experts": 8, "num_experts_per_tok": 2}, **others)
    experts = model_named(str(path)).shape.experts
    assert experts is not None
    assert experts.layers_share == 14 / 32


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 64}, "num_experts_per_tok is missing"),
        ({"vision_config": {"depth": 32}}, "vision_config: images have positions"),
        ({"rope_scaling": {"mrope_section": [1]}}, "rope_scaling: images have positions"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "layer_types: layers of linear"),
        ({"hidden_size": "4096"}, "hidden_size '4096': Expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: Expected int >= 1"),
        ({"vocab_size": None}, "vocab_size None: Expected int"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000: Expected int <= 10000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false': Expected bool"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5: must divide 32 heads"),
        ({"hidden_size": 4095, "head_dim": None}, "hidden_size 4095: 32 heads do not divide it"),
    ],
)
def test_what_training_refuses_is_named(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        model_named(str(write_config(tmp_path, **changes)))


def test_prior_is_a_power_of_the_share_of_blocks():
    curves = prior_coverage(3, 256)
    assert curves.observed_LU.all()
    for blocks in (3, 40, 181):
        middle = 2 ** (np.floor(np.log2(blocks)) + 0.5)
        for budget in (1, 2):
            expected = min(budget / middle, 1.0) ** 0.35
            assert curves.coverage(2, blocks, budget) == pytest.approx(expected)
        assert curves.coverage(0, blocks, blocks) == 1.0
