# SPDX-License-Identifier: Apache-2.0
"""Files of a Hugging Face directory: weights whole, in shards, damaged; and those beside them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from convert.tiny_models import save, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.mapping import Parameter, parameters
from sparsebalance_megatron.convert.weight_files import (
    INDEX,
    WHOLE,
    TensorPlan,
    WeightFiles,
    copy_companions,
    write_weights,
)
from sparsebalance_megatron.errors import ConvertError

PROJECTION = "model.layers.1.self_attn.k_proj.weight"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return save(tiny_model("llama-plain"), tmp_path / "whole")


def mapped(directory: Path) -> tuple[Parameter, ...]:
    return parameters(read_config(directory))


def change(directory: Path, **changes: torch.Tensor | None) -> Path:
    """Replace, add or (None) remove tensors of the whole file; ``__`` in names stands for a dot."""
    tensors = load_file(directory / WHOLE)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, directory / WHOLE, metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize("max_shard_size", ["1GB", "40KB"])
def test_tensors_are_those_that_transformers_saved(max_shard_size: str, tmp_path: Path) -> None:
    model = tiny_model("qwen2-tied").to(torch.bfloat16)
    directory = save(model, tmp_path, max_shard_size=max_shard_size)
    assert (directory / INDEX).exists() == (max_shard_size == "40KB")
    with WeightFiles(directory) as files:
        files.check_matches(mapped(directory))
        assert files.common_dtype() == torch.bfloat16
        for name, parameter in model.named_parameters():
            assert torch.equal(files.read(name), parameter)
            assert files.shape(name) == tuple(parameter.shape)


def test_mixed_dtypes_need_the_one_that_holds_both(whole: Path) -> None:
    change(whole, lm_head__weight=load_file(whole / WHOLE)["lm_head.weight"].half())
    with WeightFiles(whole) as files:
        assert files.dtypes["lm_head.weight"] == torch.float16
        assert files.common_dtype() == torch.float32


def test_missing_tensors_are_named(whole: Path) -> None:
    change(whole, **{PROJECTION.replace(".", "__"): None})
    with (
        WeightFiles(whole) as files,
        pytest.raises(ConvertError, match=rf"missing: 1 \({PROJECTION}\)"),
    ):
        files.check_matches(mapped(whole))


def test_unknown_tensors_are_named_and_counted(whole: Path) -> None:
    extra = {f"model__layers__0__adapter_{place}": torch.ones(1) for place in range(7)}
    change(whole, **extra)
    with (
        WeightFiles(whole) as files,
        pytest.raises(ConvertError, match=r"7 \(model.layers.0.adapter_0, .* and 2 more\)"),
    ):
        files.check_matches(mapped(whole))


def test_recomputed_tensors_are_counted_and_allowed(whole: Path) -> None:
    change(whole, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(8))
    with WeightFiles(whole) as files:
        files.check_matches(mapped(whole))
        assert files.recomputed == 1


def test_a_wrong_shape_is_named(whole: Path) -> None:
    change(whole, **{PROJECTION.replace(".", "__"): torch.zeros(32, 64)})
    with (
        WeightFiles(whole) as files,
        pytest.raises(ConvertError, match=r"has shape \[32, 64\], config.json says \[16, 64\]"),
    ):
        files.check_matches(mapped(whole))


def test_quantised_tensors_are_refused(whole: Path) -> None:
    change(whole, **{PROJECTION.replace(".", "__"): torch.zeros(16, 64, dtype=torch.int8)})
    with pytest.raises(ConvertError, match=rf"{PROJECTION} is stored as I8"):
        WeightFiles(whole)


def test_absent_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match=f"neither {WHOLE} nor {INDEX}"):
        WeightFiles(tmp_path)
    (tmp_path / WHOLE).write_bytes(b"no safetensors")
    with pytest.raises(ConvertError, match=WHOLE):
        WeightFiles(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(ConvertError, match="no weight_map"):
        WeightFiles(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "one", "b": WHOLE}}))
    with pytest.raises(ConvertError, match=r"missing: 1 \(one\)"):
        WeightFiles(tmp_path)


@pytest.mark.parametrize(("max_file_bytes", "files"), [(10**9, 1), (50_000, 7), (1, 21)])
def test_what_is_written_loads_in_transformers(
    max_file_bytes: int, files: int, tmp_path: Path
) -> None:
    model = tiny_model("llama-plain")
    model.config.save_pretrained(tmp_path)
    plans = [
        TensorPlan(name=name, bytes=4 * parameter.numel(), make=parameter.detach)
        for name, parameter in model.named_parameters()
    ]
    assert write_weights(tmp_path, plans, max_file_bytes=max_file_bytes) == files
    contents = [list(load_file(path).values()) for path in tmp_path.glob("*.safetensors")]
    assert len(contents) == files
    assert all(
        len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= max_file_bytes
        for tensors in contents
    )
    assert (tmp_path / INDEX).exists() == (files > 1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name))


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
