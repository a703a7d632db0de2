# SPDX-License-Identifier: Apache-2.0
"""Sizes of a dense model from a Hugging Face config.json; no weights, no other library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsebalance_megatron.json_file import UnreadableFileError, read_json
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.presets import MODELS, ModelPreset, model_preset, preset

_LARGEST = 2**32
_NOT_DENSE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "ssm_cfg")
"""Keys of models whose layers cost otherwise than those of dense, grouped-query attention."""


def model_named(name: str) -> ModelPreset:
    """A preset by its name, or the model that a directory's config.json describes.

    Raises:
        WorkloadError: it is neither, or no dense model.
    """
    if name in MODELS:
        return preset(name)
    directory = Path(name)
    if not name or not directory.is_dir():
        raise WorkloadError(
            f"--model {name}: is no directory with a config.json; give one, or one of the models "
            "that --help lists"
        )
    return read_sizes(directory)


def read_sizes(directory: Path) -> ModelPreset:
    """What ``directory/config.json`` says of a model's sizes.

    Missing keys take the defaults of ``transformers``: as many KV heads as query heads, and heads
    that divide the hidden size.

    Raises:
        WorkloadError: naming the file and the key.
    """
    path = directory / "config.json"
    try:
        values = read_json(path)
    except UnreadableFileError as error:
        raise WorkloadError(f"{path}: {error}; give a model's directory") from error
    if not isinstance(values, dict):
        raise WorkloadError(f"{path}: not a JSON object; give a model's directory")
    for key in _NOT_DENSE:
        if values.get(key):
            raise WorkloadError(
                f"{path}: {key} {values[key]}: only dense models have counted costs; measure this "
                "one with `sparse-balance profile` and give --cost-table"
            )

    def size(key: str, default: int | None = None) -> int:
        value: Any = values.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < _LARGEST:
            raise WorkloadError(f"{path}: {key} {value!r}: must be a positive whole number")
        return value

    hidden_size, heads = size("hidden_size"), size("num_attention_heads")
    kv_heads = size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise WorkloadError(f"{path}: num_key_value_heads {kv_heads}: must divide {heads} heads")
    return model_preset(
        directory.resolve().name,
        layers=size("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=size("intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", hidden_size // heads),
        vocab_size=size("vocab_size"),
        tied_embeddings=values.get("tie_word_embeddings") is True,
    )
