# SPDX-License-Identifier: Apache-2.0
"""Files that commands which plan read: lengths of samples, and sizes of models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.data.documents import document_lengths_tokens
from sparsebalance_megatron.simulate.lengths import WorkloadError, read_lengths
from sparsebalance_megatron.simulate.models import MODELS, preset

LENGTHS_HELP = "JSON list, text with one per line, or the prefix of .bin and .idx files"


@dataclass(frozen=True, kw_only=True)
class NamedModel:
    """Sizes of a model; ``shape`` is that of one tensor-parallel rank of one."""

    name: str
    layers: int
    shape: ModelShape
    tied_embeddings: bool


def lengths_of(path: Path) -> np.ndarray:
    """Lengths in tokens from a list, or of the documents of ``path``.idx; empty ones left out.

    Raises:
        WorkloadError, DataError: the file is missing, damaged, or holds no lengths.
    """
    index = path if path.suffix == ".idx" else path.with_name(f"{path.name}.idx")
    if (path.exists() and path != index) or not index.is_file():
        return read_lengths(path)
    lengths = document_lengths_tokens(index)
    lengths = lengths[lengths > 0]
    if not len(lengths):
        raise WorkloadError(f"{index}: holds no document with a token")
    return lengths


_TIED = frozenset({"qwen2.5-0.5b", "qwen2.5-3b"})
"""Public models whose output layer is the embedding."""


def model_of(name: str) -> NamedModel:
    """A public model by its name, or the model of a Hugging Face directory with a config.json.

    Raises:
        WorkloadError: neither is there.
        ConvertError: the directory's model is not a dense Llama, Mistral or Qwen2.
    """
    if name in MODELS:
        known = preset(name)
        return NamedModel(
            name=name, layers=known.layers, shape=known.shape, tied_embeddings=name in _TIED
        )
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise WorkloadError(
            f"--model {name}: not one of {', '.join(MODELS)}, and no directory with a config.json"
        )
    # It loads torch.
    from sparsebalance_megatron.convert.hf_config import read_config

    model = read_config(folder)
    shape = ModelShape(
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.attention_heads,
        num_query_groups=model.query_groups,
        head_dim=model.head_dim,
        vocab_size=model.vocab_size,
        gated_linear_unit=True,
        tensor_parallel_size=1,
    )
    return NamedModel(
        name=folder.name, layers=model.layers, shape=shape, tied_embeddings=model.tied
    )
