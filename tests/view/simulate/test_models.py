# SPDX-License-Identifier: Apache-2.0
"""Public sizes, models of a directory, counted costs, and the coverage prior."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparsebalance_megatron.cost.model import PEAK_FLOPS_PER_MS
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.learn.prediction import prior_coverage
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.models import (
    MODELS,
    counted_cost,
    model_named,
)

H200_PEAK = PEAK_FLOPS_PER_MS["h200"]
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


@pytest.mark.parametrize("name", MODELS)
def test_a_preset_has_the_published_number_of_parameters(name: str) -> None:
    model = MODELS[name]
    embeddings = 1 if model.tied_embeddings else 2
    shape = model.shape
    parameters = model.layers * shape.layer_weights + embeddings * shape.vocabulary_weights
    assert parameters / 1e9 == pytest.approx(PUBLISHED_BILLIONS[name], rel=AS_PUBLISHED)


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(WorkloadError, match=r"--model gpt: is no directory .* qwen2\.5-0\.5b"):
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


def test_a_directory_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"config\.json: cannot be read"):
        model_named(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(WorkloadError, match="Expected object"):
        model_named(str(tmp_path))


def test_qwen25_3b_layer_counted_by_hand():
    """Per token 2 x (q, k, v, o, three MLP matrices); per block pair 4 x heads x head_dim x B^2."""
    cost = counted_cost(MODELS["qwen2.5-3b"], block_size=256)
    linear_flops = 2 * (2048 * 2048 * 2 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    pair_flops = 4 * 16 * 128 * 256**2
    linear = cost.coefficients_ms(Part.LINEAR, Direction.FORWARD)
    attention = cost.coefficients_ms(Part.ATTENTION, Direction.FORWARD)
    assert linear[2] == pytest.approx(linear_flops / (0.5 * H200_PEAK))
    assert attention[3] == pytest.approx(pair_flops / (0.3 * H200_PEAK))
    head = cost.coefficients_ms(Part.HEAD, Direction.BACKWARD)
    assert head[2] == pytest.approx(2 * 2 * 2048 * 151936 / (0.5 * H200_PEAK))


def test_tensor_parallel_ranks_share_the_work():
    model = MODELS["qwen2.5-0.5b"]
    one, two = (counted_cost(model, block_size=256, tensor_parallel_size=tp) for tp in (1, 2))
    for part in (Part.LINEAR, Part.ATTENTION, Part.HEAD):
        ratio = one.coefficients_ms(part, Direction.FORWARD).sum()
        assert ratio == pytest.approx(2 * two.coefficients_ms(part, Direction.FORWARD).sum())


def test_prior_is_a_power_of_the_share_of_blocks():
    curves = prior_coverage(3, 256)
    assert curves.observed_LU.all()
    for blocks in (3, 40, 181):
        middle = 2 ** (np.floor(np.log2(blocks)) + 0.5)
        for budget in (1, 2):
            expected = min(budget / middle, 1.0) ** 0.35
            assert curves.coverage(2, blocks, budget) == pytest.approx(expected)
        assert curves.coverage(0, blocks, blocks) == 1.0
