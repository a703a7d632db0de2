# SPDX-License-Identifier: Apache-2.0
"""Public sizes, models of a directory, counted costs, and the coverage prior."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparsebalance_megatron.learn.prediction import prior_coverage
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.models import MODELS, model_named

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
    "deepseek-v2-lite": 2.4,
    "kimi-k2": 32,
    "glm-4.5": 32,
    # Its card says 3.3, with the embedding.
    "qwen3-30b-a3b": 3.3 - 0.31,
    "gpt-oss-120b": 5.1,
}
"""Sizes from the model cards (Qwen, activated parameters of experts) and safetensors indices
(Llama)."""
AS_PUBLISHED = 0.03
"""Cards round to two or three digits; biases and norms are left out here."""


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    model = MODELS[name]
    # Activated parameters count no embedding: a token takes one row of it.
    embeddings = 1 if model.tied_embeddings or model.activated else 2
    shape = model.shape
    parameters = model.layers * shape.layer_weights + embeddings * shape.vocabulary_weights
    assert parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=AS_PUBLISHED)


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


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_experts": 64}, "num_experts 64: only dense models"),
        ({"kv_lora_rank": 512}, "kv_lora_rank 512: only dense models"),
        ({"hidden_size": "4096"}, "hidden_size '4096': Expected int"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: Expected int >= 1"),
        ({"vocab_size": None}, "vocab_size None: Expected int"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers 1000000: Expected int <= 10000"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings 'false': Expected bool"),
        ({"num_key_value_heads": 5}, "num_key_value_heads 5: must divide 32 heads"),
    ],
)
def test_what_is_no_dense_model_is_named(tmp_path: Path, changes: dict, named: str) -> None:
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
