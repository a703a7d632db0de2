# SPDX-License-Identifier: Apache-2.0
"""Names and shapes as transformers has them; weights from files into parameters and back."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from convert.tiny_models import VARIANTS, VOCABULARY, save, stored_tensors, tiny_config, tiny_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from sparsebalance_megatron.convert.hf_config import Decoder, read_config
from sparsebalance_megatron.convert.mapping import parameters, tensor_shapes, to_megatron
from sparsebalance_megatron.convert.transfer import (
    INDEX,
    WHOLE,
    TransferCounts,
    WeightFiles,
    copy_companions,
    read_weights,
    write_weights,
)
from sparsebalance_megatron.errors import ConvertError

PADDED = 256
EMBEDDING_OF_HF = "model.embed_tokens.weight"
EMBEDDING = "embedding.word_embeddings.weight"


def poisoned_targets(model: Decoder, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Parameters of the right shapes, full of NaN."""
    return {
        parameter.name: torch.full_like(
            to_megatron(
                parameter,
                [torch.empty(shape, dtype=dtype) for shape in parameter.sources.values()],
                model,
                padded_vocab_size=PADDED,
            ),
            float("nan"),
        )
        for parameter in parameters(model)
    }


def transfer(
    directory: Path, dtype: torch.dtype
) -> tuple[Decoder, dict[str, torch.Tensor], TransferCounts]:
    model = read_config(directory)
    targets = poisoned_targets(model, dtype)
    with WeightFiles(directory) as files:
        counts = read_weights(files, targets, model, parameters(model))
    return model, targets, counts


@pytest.mark.parametrize(("max_file_bytes", "files"), [(10**9, 1), (50_000, 7), (1, 21)])
def test_what_is_written_loads_in_transformers(
    max_file_bytes: int, files: int, tmp_path: Path
) -> None:
    source = tiny_model("llama-plain")
    model, targets, _ = transfer(save(source, tmp_path / "in"), torch.float32)
    source.config.save_pretrained(tmp_path)
    counts = write_weights(tmp_path, targets, model, torch.float32, max_file_bytes=max_file_bytes)
    contents = [list(load_file(path).values()) for path in tmp_path.glob("*.safetensors")]
    assert counts.files == len(contents) == files
    assert all(
        len(tensors) == 1 or sum(tensor.nbytes for tensor in tensors) <= max_file_bytes
        for tensors in contents
    )
    assert (tmp_path / INDEX).exists() == (files > 1)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, source.get_parameter(name))


def test_a_cast_is_counted_and_an_error_where_numbers_exceed_the_range(tmp_path: Path) -> None:
    source = tiny_model("llama-plain")
    for number in (float("nan"), float("inf")):
        source.get_parameter("model.norm.weight").data[3:5] = number
        text = r"final_layernorm.weight: 2 of 64 numbers are NaN or infinite"
        with pytest.raises(ConvertError, match=text):
            transfer(save(source, tmp_path), torch.float32)
    source.get_parameter("model.norm.weight").data[4] = 1.0
    source.get_parameter("model.norm.weight").data[3] = 1e6
    with pytest.raises(ConvertError, match=r"final_layernorm.*exceed the range of torch.float16"):
        transfer(save(source, tmp_path), torch.float16)
    model, targets, counts = transfer(tmp_path, torch.bfloat16)
    assert counts.cast == 21
    embedding = source.get_parameter("model.embed_tokens.weight")
    assert torch.equal(targets[EMBEDDING][:VOCABULARY], embedding.to(torch.bfloat16))
    with pytest.raises(ConvertError, match=r"final_layernorm.*exceed the range of torch.float16"):
        write_weights(tmp_path, targets, model, torch.float16)


def test_a_tied_output_layer_must_be_the_embedding(tmp_path: Path) -> None:
    directory = save(tiny_model("qwen2-tied"), tmp_path)
    tensors = load_file(directory / WHOLE)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, directory / WHOLE)
    assert transfer(directory, torch.float32)[2].left_out == 1
    tensors["lm_head.weight"][0, 0] += 1
    save_file(tensors, directory / WHOLE)
    with pytest.raises(ConvertError, match="tie_word_embeddings true"):
        transfer(directory, torch.float32)


def test_a_parameter_of_another_shape_is_an_error(tmp_path: Path) -> None:
    directory = save(tiny_model("llama-plain"), tmp_path)
    model = read_config(directory)
    targets = poisoned_targets(model, torch.float32)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    targets[name] = torch.empty(96, 64)
    with (
        WeightFiles(directory) as files,
        pytest.raises(ConvertError, match=rf"{name}.*\[96, 64\].*\[192, 64\]"),
    ):
        read_weights(files, targets, model, parameters(model))


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
        assert files.tensors["lm_head.weight"].dtype == torch.float16
        assert files.common_dtype() == torch.float32


def test_recomputed_tensors_are_counted_and_allowed(whole: Path) -> None:
    change(whole, "model.layers.0.self_attn.rotary_emb.inv_freq", torch.ones(8))
    with WeightFiles(whole) as files:
        files.check_matches(read_config(whole))
        assert files.recomputed == 1


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        (WHOLE, "are two sets of weights; remove one"),
        (None, f"{EMBEDDING_OF_HF} is in model-.*, too"),
    ],
)
def test_weights_that_are_there_twice_are_named(
    file: str | None, problem: str, tmp_path: Path
) -> None:
    directory = save(tiny_model("llama-plain"), tmp_path, max_shard_size="40KB")
    shards = sorted(directory.glob("model-*.safetensors"))
    without = (each for each in shards if EMBEDDING_OF_HF not in load_file(each))
    path = directory / file if file else next(without)
    tensors = load_file(path) if path.exists() else {}
    save_file(tensors | {EMBEDDING_OF_HF: torch.zeros(VOCABULARY, 64)}, path)
    with pytest.raises(ConvertError, match=problem):
        WeightFiles(directory)


YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("stored", "changes", "dtype"),
    [
        ({"dtype": "float32", "x": 1}, {"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float32"}, {"torch_dtype": "float16"}, "float16"),
        ({"rope_theta": 1e6, "rope_scaling": YARN}, {"dtype": "float32"}, "float32"),
        # The keys of transformers 4, which knows no others and takes its defaults without a word.
        (
            {"rope_parameters": {**YARN, "rope_theta": 1e6}, "num_local_experts": 8},
            {"rope_theta": 1e6, "rope_scaling": YARN, "num_experts": 8, "dtype": "float32"},
            "float32",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            {"rope_theta": 1e4, "dtype": "float32"},
            "float32",
        ),
    ],
)
def test_companions_are_copied_and_config_json_follows(
    stored: dict, changes: dict, dtype: str, tmp_path: Path
) -> None:
    """Keys of an earlier training are replaced, or fall away."""
    (tmp_path / "config.json").write_text(json.dumps(stored | {"earlier": 1, "replaced": 2}))
    (tmp_path / "tokenizer.json").write_text("tokens")
    (tmp_path / "README.md").write_text("not copied")
    output = tmp_path / "out"
    output.mkdir()
    own_keys = {"earlier": None, "replaced": [3]}
    copied = copy_companions(tmp_path, output, getattr(torch, dtype), own_keys)
    assert copied == ("config.json", "tokenizer.json")
    assert sorted(path.name for path in output.iterdir()) == sorted(copied)
    written = json.loads((output / "config.json").read_text())
    assert written == stored | changes | {"replaced": [3]}
    assert (output / "tokenizer.json").read_text() == "tokens"


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_tensor_of_transformers_is_the_source_of_one_parameter(
    variant: str, tmp_path: Path
) -> None:
    tiny_config(variant).save_pretrained(tmp_path)
    mapped = parameters(read_config(tmp_path))
    sources = [source for parameter in mapped for source in parameter.sources]
    assert max(Counter(sources).values()) == 1
    assert max(Counter(parameter.name for parameter in mapped).values()) == 1
    written = stored_tensors(tiny_model(variant))
    assert tensor_shapes(read_config(tmp_path)) == {
        name: tuple(tensor.shape) for name, tensor in written.items()
    }
