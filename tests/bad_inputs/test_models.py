# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers of Hugging Face that are damaged, foreign, or out of reach."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_inputs.judge import check_refused
from safetensors.torch import save_file

from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.mapping import tensor_shapes
from sparsebalance_megatron.convert.transfer import INDEX, WHOLE, WeightFiles
from sparsebalance_megatron.data.prepare import DocumentTokenizer
from sparsebalance_megatron.errors import ConvertError, DataError

CONFIG: dict[str, Any] = {
    **{"model_type": "llama", "hidden_size": 16, "intermediate_size": 24, "vocab_size": 20},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"max_position_embeddings": 64, "rms_norm_eps": 1e-6, "torch_dtype": "float32"},
}
DELETED = object()
SIZES: tuple[Any, ...] = (
    *(0, -1, 1.5, "16", True, [], {}, float("nan"), float("inf"), 10**400, 2**60),
)
BAD: dict[str, tuple[Any, ...]] = {
    "model_type": (DELETED, None, "gpt2", 5, [], {}),
    "hidden_size": (*SIZES, 15, DELETED),
    "intermediate_size": (*SIZES, DELETED),
    "num_hidden_layers": (*SIZES, 10**7, DELETED),
    "num_attention_heads": (*SIZES, 3, DELETED),
    "num_key_value_heads": (*SIZES, 3),
    "vocab_size": (*SIZES, DELETED),
    "head_dim": SIZES,
    "max_position_embeddings": (*SIZES, DELETED),
    "rms_norm_eps": ("small", True, [], float("nan"), 10**400, 0, -1e-6, 1),
    "attention_dropout": ("none", [], float("inf"), -0.1, 1),
    "torch_dtype": ("float8", 5, [], ["float32"], {"a": 1}),
    "layer_types": (
        *(5, "full_attention", {"a": 1}, ["sliding_attention"], [None], [5]),
        ["full_attention"] * 2,
    ),
    "hidden_act": ("gelu", 5, []),
    "attention_bias": (True, 1.5, "no"),
    "mlp_bias": (True, "no"),
    "sliding_window": (4096, "none"),
    "tie_word_embeddings": ("false", 1, []),
    **dict.fromkeys(("num_experts", "num_local_experts"), (8, 1, -1, "none", [])),
    "quantization_config": ({}, {"bits": 4}, 5),
    "rope_theta": (*SIZES,),
    "rope_scaling": (5, [], "linear", {"rope_type": "su"}, {"type": 5}, {"type": ["linear"]}),
    "rope_parameters": (
        *({"rope_type": "linear"}, {"rope_type": "linear", "factor": "2"}),
        *({"rope_type": "linear", "factor": 1.5}, {"rope_type": "yarn"}),
        *({"rope_type": "yarn", "factor": 10**400}, {"rope_type": "llama3"}),
        *({"rope_type": "yarn", "factor": 2, "mscale": []}, {"sliding": {"rope_type": "x"}}),
        *({"rope_type": "yarn", "factor": 2, "truncate": False}, {"rope_theta": "big"}),
        *({"rope_type": "yarn", "factor": 0}, {"rope_type": "linear", "factor": -2}),
        *({"rope_type": "yarn", "factor": 2, key: -1} for key in ("mscale", "beta_slow")),
        {"rope_type": "yarn", "factor": 2, "beta_fast": 1},
        {"rope_type": "llama3", "factor": 2, "low_freq_factor": -1},
    ),
    "partial_rotary_factor": (0.5, "all"),
}
TEXTS: tuple[bytes, ...] = (
    *(b"", b'{"model_type": "llama"', b"[]", b"null", b'{"rope_scaling":' * 200_000, b"\xff\xfe"),
    *(b'{"hidden_size": ' + b"9" * 5000 + b"}", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "),
)


def with_config(folder: Path, **changes: Any) -> Path:
    values = {key: value for key, value in (CONFIG | changes).items() if value is not DELETED}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


CASES = [(key, value) for key, values in BAD.items() for value in values]


@pytest.mark.parametrize(
    ("key", "value"),
    CASES,
    ids=[f"{key} {'deleted' if value is DELETED else str(value)[:30]}" for key, value in CASES],
)
def test_config(key: str, value: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    """The folder's name is none of the keys."""
    folder = with_config(tmp_path_factory.mktemp("model"), **{key: value})
    infinite = isinstance(value, float) and not math.isfinite(value)
    named = "not valid JSON" if infinite else key
    check_refused(lambda: read_config(folder), ConvertError, "config.json: ", named)


@pytest.mark.parametrize("text", TEXTS, ids=lambda text: str(text[:20]))
def test_texts(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text)
    check_refused(lambda: read_config(tmp_path), ConvertError, "config.json")


def write_weights(folder: Path) -> dict[str, torch.Tensor]:
    model = read_config(with_config(folder))
    tensors = {name: torch.ones(shape) for name, shape in tensor_shapes(model).items()}
    save_file(tensors, folder / WHOLE, metadata={"format": "pt"})
    return tensors


def read_weights(folder: Path) -> None:
    with WeightFiles(folder) as files:
        files.check_matches(read_config(folder))


OUTSIDE = ("../other/x.safetensors", "/etc/passwd", "x/../../y.safetensors", "sub/x.safetensors")
WEIGHT_MAPS: tuple[Any, ...] = (
    *(
        {},
        [],
        *({"weight_map": each} for each in ({}, None, ["a"], {"a": 5, "b": "c.safetensors"})),
    ),
    *(
        {"weight_map": {"a": each}}
        for each in (None, ["b"], "", ".", "..", "x.safetensors", *OUTSIDE)
    ),
    {"weight_map": {"a": "config.json"}},
)


@pytest.mark.parametrize("index", WEIGHT_MAPS, ids=str)
def test_indices(index: Any, tmp_path: Path) -> None:
    write_weights(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    check_refused(lambda: read_weights(tmp_path), ConvertError, str(tmp_path))


WEIGHTS: dict[str, Callable[[bytes], bytes]] = {
    "nothing": lambda raw: b"",
    "cut inside the tensors": lambda raw: raw[:-5],
    "a header beyond the file": lambda raw: (2**40).to_bytes(8, "little") + raw[8:],
    "text": lambda raw: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n",
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_weights(name: str, tmp_path: Path) -> None:
    write_weights(tmp_path)
    path = tmp_path / WHOLE
    path.write_bytes(WEIGHTS[name](path.read_bytes()))
    check_refused(lambda: read_weights(tmp_path), ConvertError, str(tmp_path))


TENSORS: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {
    "missing": ({"model.norm.weight": None}, "missing: model.norm.weight"),
    "unknown": (
        {f"model.adapter.{place}": torch.ones(2) for place in range(7)},
        "7 (model.adapter.0, model.adapter.1, ",
    ),
    "shape": ({"model.norm.weight": torch.ones(17)}, "has shape [17], config.json says [16]"),
    "dtype": (
        {"model.norm.weight": torch.ones(16, dtype=torch.int8)},
        "norm.weight is stored as I8",
    ),
}


@pytest.mark.parametrize("change", TENSORS)
def test_tensors(change: str, tmp_path: Path) -> None:
    changes, text = TENSORS[change]
    tensors = write_weights(tmp_path) | changes
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, tmp_path / WHOLE, metadata={"format": "pt"})
    check_refused(lambda: read_weights(tmp_path), ConvertError, str(tmp_path), text)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    with_config(tmp_path)
    check_refused(lambda: read_weights(tmp_path), ConvertError, f"neither {WHOLE} nor {INDEX}")


@pytest.mark.parametrize(
    "text",
    [
        *(b"{}", b"[]", b"null", b"", b'{"model": ', b"\xff\xfe"),
        *(b'{"version": "1.0", "model": {"type": %s}}' % kind for kind in (b'"BPE"', b'"X"')),
    ],
)
def test_tokenizers(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(text)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
    )
    check_refused(lambda: DocumentTokenizer(str(tmp_path)), DataError, f"--tokenizer {tmp_path}")


def test_code_beside_a_tokenizer_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"auto_map": {"AutoTokenizer": ["code.Own", None]}, "tokenizer_class": "Own"})
    )
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    check_refused(lambda: DocumentTokenizer(str(tmp_path)), DataError, f"--tokenizer {tmp_path}")
    assert not (tmp_path / "ran").exists()
