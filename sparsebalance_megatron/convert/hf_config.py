# SPDX-License-Identifier: Apache-2.0
"""Read a Hugging Face config.json, and refuse by name what Megatron's dense GPT cannot express.

Missing keys take the defaults of the family's configuration class in ``transformers``; settings of
RoPE are read in both places where its versions write them (``rope_parameters``, or ``rope_theta``
with ``rope_scaling``).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import torch

from sparsebalance_megatron.convert.dense_model import DenseModel, Family, Rope
from sparsebalance_megatron.errors import ConvertError
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
"""Names of config.json for the dtypes that weights may have."""

_ELSEWHERE = "other models: use Megatron-Bridge (docs/CONVERT.md)"
_LARGEST_NUMBER = 2**40
_SHOWN_CHARACTERS = 80
_LLAMA3_POSITIONS = 8192
_LLAMA3_CONSTANTS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": _LLAMA3_POSITIONS,
}
"""What Megatron's RotaryEmbedding has built in."""


def read_config(directory: Path) -> DenseModel:
    """The model that ``directory/config.json`` describes.

    Raises:
        ConvertError: if the file is missing or damaged, or asks for something that is not
            supported; the text names the key.
    """
    settings = _Settings(directory / "config.json")
    family = _family(settings)
    _refuse_what_differs(settings, family)
    heads = settings.integer("num_attention_heads")
    hidden_size = settings.integer("hidden_size")
    groups = settings.integer("num_key_value_heads", heads if family == "llama" else None)
    if heads % groups:
        settings.refuse("num_key_value_heads", f"must divide num_attention_heads {heads}")
    if settings.get("head_dim") is None and hidden_size % heads:
        settings.refuse("num_attention_heads", f"must divide hidden_size {hidden_size}")
    max_positions = settings.integer("max_position_embeddings")
    return DenseModel(
        family=family,
        layers=settings.integer("num_hidden_layers"),
        hidden_size=hidden_size,
        ffn_hidden_size=settings.integer("intermediate_size"),
        attention_heads=heads,
        query_groups=groups,
        head_dim=settings.integer("head_dim", hidden_size // heads),
        vocab_size=settings.integer("vocab_size"),
        max_positions=max_positions,
        norm_epsilon=settings.number("rms_norm_eps", 1e-6),
        attention_dropout=settings.number("attention_dropout", 0.0),
        rope=_rope(settings, max_positions),
        tied=bool(settings.get("tie_word_embeddings", False)),
        qkv_bias=family == "qwen2",
        dtype=_dtype(settings),
    )


class _Settings:
    """The keys of one JSON object, with errors that name the file and the key."""

    def __init__(self, path: Path, values: Mapping[str, Any] | None = None, prefix: str = ""):
        self._path = path
        self._prefix = prefix
        self._values = _read_json(path) if values is None else values

    def get(self, key: str, default: Any = None) -> Any:
        """Null counts as absent, as it does in ``transformers``."""
        value = self._values.get(key)
        return default if value is None else value

    def within(self, key: str) -> _Settings:
        """The object under a key, without its nulls."""
        values = self.get(key, {})
        if not isinstance(values, dict):
            self.refuse(key, "must be an object")
        return _Settings(self._path, values, f"{self._prefix}{key}.")

    def items(self) -> Mapping[str, Any]:
        return self._values

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive whole number, written as 32 or 32.0."""
        value = self.number(key, default)
        if value != int(value) or value < 1:
            self.refuse(key, "must be a positive whole number")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        """Without a default, the key must be there."""
        value = self.get(key, default)
        if value is None:
            raise ConvertError(f"{self._path}: no {self._prefix}{key}; the key must be there")
        if isinstance(value, bool) or not isinstance(value, int | float):
            self.refuse(key, "must be a number")
        if abs(value) > _LARGEST_NUMBER:
            self.refuse(key, f"must be at most {_LARGEST_NUMBER:g}")
        return float(value)

    def refuse(self, key: str, rule: str) -> Any:
        """Raise: this key, this value, this rule."""
        value = json.dumps(self._values.get(key))
        if len(value) > _SHOWN_CHARACTERS:
            value = f"{value[:_SHOWN_CHARACTERS]}..."
        raise ConvertError(f"{self._path}: {self._prefix}{key} {value}: {rule}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = read_json(path)
    except UnreadableFileError as error:
        raise ConvertError(
            f"{path}: {error}; give a directory that save_pretrained wrote"
        ) from error
    if not isinstance(values, dict):
        raise ConvertError(f"{path}: not a JSON object")
    return values


def _family(settings: _Settings) -> Family:
    model_type = settings.get("model_type")
    for family in get_args(Family):
        if model_type == family:
            return family
    return settings.refuse(
        "model_type", f"supported are {', '.join(get_args(Family))}; {_ELSEWHERE}"
    )


def _refuse_what_differs(settings: _Settings, family: Family) -> None:
    """Settings that change the mathematics of these families, beside RoPE."""
    for key, expected, rule in (
        ("quantization_config", None, "quantised weights are not supported; dequantise them first"),
        ("hidden_act", "silu", "only silu (SwiGLU) is supported"),
        ("attention_bias", False, "biases of the attention output are not supported"),
        ("mlp_bias", False, "biases in the MLP are not supported"),
        ("use_sliding_window", False, "sliding windows are not supported"),
    ):
        if settings.get(key, expected) != expected:
            settings.refuse(key, rule)
    layer_types = settings.get("layer_types", [])
    if not isinstance(layer_types, list):
        settings.refuse("layer_types", "must be a list")
    if any(kind != "full_attention" for kind in layer_types):
        settings.refuse("layer_types", "only full_attention is supported")
    # Qwen2 keeps a window that use_sliding_window switches off; null switches Mistral's off.
    if family != "qwen2" and settings.get("sliding_window") is not None:
        settings.refuse("sliding_window", "sliding windows are not supported; must be null")
    if family == "mistral" and "sliding_window" not in settings.items():
        settings.refuse("sliding_window", "absent means 4096 tokens; must be null")


def _dtype(settings: _Settings) -> torch.dtype | None:
    key = "dtype" if settings.get("dtype") is not None else "torch_dtype"
    name = settings.get(key)
    if name is None or name == "auto":
        return None
    if not isinstance(name, str) or name not in DTYPES:
        settings.refuse(key, f"supported are {', '.join(DTYPES)}")
    return DTYPES[name]


def _rope(settings: _Settings, max_positions: int) -> Rope:
    found = "rope_parameters" if settings.get("rope_parameters") is not None else "rope_scaling"
    scaling = settings.within(found)
    if any(isinstance(value, dict) for value in scaling.items().values()):
        settings.refuse(found, "RoPE that differs between layers is not supported")
    for place in (scaling, settings):
        if place.get("partial_rotary_factor", 1.0) != 1.0:
            place.refuse("partial_rotary_factor", "Megatron rotates whole heads here; must be 1")
    owner = scaling if scaling.get("rope_theta") is not None else settings
    base = owner.integer("rope_theta", 10000)
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default":
            return Rope(base=base)
        case "linear":
            # Megatron's --rotary-seq-len-interpolation-factor is a whole number.
            return Rope(base=base, kind="linear", factor=scaling.integer("factor"))
        case "llama3":
            for key, built_in in _LLAMA3_CONSTANTS.items():
                absent = max_positions if key == "original_max_position_embeddings" else None
                if scaling.number(key, absent) != built_in:
                    scaling.refuse(key, f"Megatron has {built_in} built in")
            return Rope(
                base=base,
                kind="llama3",
                factor=scaling.number("factor"),
                original_positions=_LLAMA3_POSITIONS,
            )
        case "yarn":
            return _yarn(scaling, base, max_positions)
        case _:
            key = "rope_type" if scaling.get("rope_type") is not None else "type"
            return scaling.refuse(key, "supported are default, linear, llama3, yarn")


def _yarn(scaling: _Settings, base: int, max_positions: int) -> Rope:
    for key in ("attention_factor", "finetuned", "beta_mscale"):
        if scaling.get(key) is not None:
            scaling.refuse(key, "Megatron derives YaRN's scale from the factor; drop the key")
    if scaling.get("truncate", True) is not True:
        scaling.refuse("truncate", "only true is supported")
    # Either alone has no effect in transformers.
    mscales = (scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0))
    mscale, mscale_all_dim = mscales if all(mscales) else (1.0, 0.0)
    return Rope(
        base=base,
        kind="yarn",
        factor=scaling.number("factor"),
        original_positions=scaling.integer("original_max_position_embeddings", max_positions),
        beta_fast=scaling.number("beta_fast", 32.0),
        beta_slow=scaling.number("beta_slow", 1.0),
        mscale=mscale,
        mscale_all_dim=mscale_all_dim,
    )
