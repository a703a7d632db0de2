# SPDX-License-Identifier: Apache-2.0
"""The names and shapes of Hugging Face's models, as `transformers` itself has them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from convert.tiny_models import VARIANTS, tiny_config, tiny_model

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.mapping import (
    is_recomputed,
    parameters,
    to_hugging_face,
    to_megatron,
)


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_transformers_is_the_source_of_one_parameter(
    variant: str, tmp_path: Path
) -> None:
    tiny_config(variant).save_pretrained(tmp_path)
    mapped = parameters(read_config(tmp_path))
    sources = [source for parameter in mapped for source in parameter.sources]
    assert max(Counter(sources).values()) == 1
    assert max(Counter(parameter.name for parameter in mapped).values()) == 1
    shapes = {
        source: shape
        for parameter in mapped
        for source, shape in zip(parameter.sources, parameter.shapes, strict=True)
    }
    expected = {
        name: tuple(parameter.shape) for name, parameter in tiny_model(variant).named_parameters()
    }
    assert shapes == expected


@pytest.mark.parametrize("variant", ["qwen2-tied", "llama-plain", "mistral-wide-heads"])
def test_there_and_back_is_the_same_to_the_bit(variant: str, tmp_path: Path) -> None:
    tiny_config(variant).save_pretrained(tmp_path)
    model = read_config(tmp_path)
    weights = tiny_model(variant).to(torch.bfloat16).state_dict()
    for parameter in parameters(model):
        sources = [weights[name] for name in parameter.sources]
        value = to_megatron(parameter, sources, model, padded_vocab_size=256)
        for back, source in zip(to_hugging_face(parameter, value, model), sources, strict=True):
            assert back.dtype == source.dtype
            assert torch.equal(back, source), parameter.name


def test_only_what_config_json_determines_is_left_out() -> None:
    assert is_recomputed("model.layers.11.self_attn.rotary_emb.inv_freq")
    assert is_recomputed("model.rotary_emb.inv_freq")
    assert not is_recomputed("model.layers.0.self_attn.q_proj.weight")
    assert not is_recomputed("model.layers.0.self_attn.rotary_emb.inv_freq_scale")
