# SPDX-License-Identifier: Apache-2.0
"""Files of a Hugging Face directory: weights whole, in shards, damaged; and those beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from convert.tiny_models import save, tiny_model
from safetensors.torch import load_file, save_file

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.mapping import parameters
from sparsebalance_megatron.convert.transfer import (
    WHOLE,
    WeightFiles,
    copy_companions,
)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(tiny_model("llama-plain"), tmp_path / "whole")


def change(directory: Path, name: str, tensor: torch.Tensor) -> None:
    """Replace or add a tensor of the whole file."""
    tensors = load_file(directory / WHOLE) | {name: tensor}
    save_file(tensors, directory / WHOLE, metadata={"format": "pt"})


def test_mixed_dtypes_need_the_one_that_holds_both(whole: Path) -> None:
    change(whole, "lm_head.weight", load_file(whole / WHOLE)["lm_head.weight"].half())
    with WeightFiles(whole) as files:
        assert files.dtypes["lm_head.weight"] == torch.float16
        assert files.common_dtype() == torch.float32


def test_recomputed_tensors_are_counted_and_allowed(whole: Path) -> None:
    change(whole, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    with WeightFiles(whole) as files:
        files.check_matches(parameters(read_config(whole)))
        assert files.recomputed == 1


@pytest.mark.parametrize(
    ("stored", "key", "dtype"),
    [
        ({"dtype": "float32", "x": 1}, "dtype", "bfloat16"),
        ({"torch_dtype": "float32"}, "torch_dtype", "float16"),
        ({"x": 1}, "dtype", "float32"),
    ],
)
def test_companions_are_copied_and_the_dtype_follows_the_weights(
    stored: dict, key: str, dtype: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    output.mkdir()
    (source / "config.json").write_text(json.dumps(stored))
    (source / "tokenizer.json").write_text("tokens")
    (source / "README.md").write_text("not copied")
    copied = copy_companions(source, output, getattr(torch, dtype))
    assert copied == ("config.json", "tokenizer.json")
    assert sorted(path.name for path in output.iterdir()) == sorted(copied)
    assert json.loads((output / "config.json").read_text()) == stored | {key: dtype}
    assert (output / "tokenizer.json").read_text() == "tokens"
