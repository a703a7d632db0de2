# SPDX-License-Identifier: Apache-2.0
"""Presets have the published numbers of parameters; directories are read as presets are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsebalance_megatron.view.simulate.hf_sizes import model_named, read_sizes
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.presets import MODELS, ModelPreset, preset

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
}
"""Of the model cards (Qwen) and the safetensors indices (Llama)."""
AS_PUBLISHED = 0.015
"""Cards round to two or three digits; biases and norms are left out here."""


def parameters(model: ModelPreset) -> int:
    """Matrices only."""
    shape = model.shape
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_query_groups * shape.head_dim
    layer = shape.hidden_size * (2 * queries + 2 * keys + 3 * shape.ffn_hidden_size)
    embeddings = 1 if model.tied_embeddings else 2
    return model.layers * layer + embeddings * shape.hidden_size * shape.vocab_size


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    assert parameters(preset(name)) / 1e9 == pytest.approx(
        PUBLISHED_BILLIONS[name], rel=AS_PUBLISHED
    )


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match=r"'gpt' is not one of qwen2\.5-0\.5b"):
        preset("gpt")
    with pytest.raises(WorkloadError, match="--model gpt: is no directory"):
        model_named("gpt")


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
    assert found == preset("llama-3.1-8b")
    qwen3 = write_config(tmp_path / "other", head_dim=64, num_key_value_heads=None)
    shape = read_sizes(qwen3).shape
    assert (shape.head_dim, shape.num_query_groups) == (64, 32)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 64}, "num_experts 64: only dense models"),
        ({"kv_lora_rank": 512}, "kv_lora_rank 512: only dense models"),
        ({"hidden_size": "4096"}, "hidden_size '4096': must be a positive whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: must be"),
        ({"vocab_size": None}, "vocab_size None: must be"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5: must divide 32 heads"),
    ],
)
def test_what_is_no_dense_model_is_named(tmp_path: Path, changes: dict, named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        read_sizes(write_config(tmp_path, **changes))


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"config\.json: cannot be read"):
        model_named(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WorkloadError, match="not a JSON object"):
        model_named(str(tmp_path))
