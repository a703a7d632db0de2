# SPDX-License-Identifier: Apache-2.0
"""Move weights one tensor or one file at a time, and count them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsebalance_megatron.convert.hf_config import DenseModel
from sparsebalance_megatron.convert.mapping import (
    EMBEDDING,
    OUTPUT,
    Parameter,
    parameters,
    to_hugging_face,
    to_megatron,
)
from sparsebalance_megatron.convert.weight_files import INDEX, WeightFiles
from sparsebalance_megatron.errors import ConvertError

MAX_FILE_BYTES = 5 * 10**9
"""Largest file written, unless one tensor alone is larger."""

Progress = Callable[[Sequence[Parameter]], Iterable[Parameter]]
"""Wraps the parameters, and may draw a bar."""


@dataclass(frozen=True, kw_only=True)
class TransferCounts:
    """What a conversion did.

    Attributes:
        tensors: of Hugging Face, read or written.
        parameters: of Megatron, written or read.
        numbers: scalars in ``tensors``: Megatron's parameters hold padding besides.
        padding_rows: rows of zeros added to each matrix of the vocabulary, or rows dropped.
        cast: tensors whose dtype changed.
        left_out: tensors of Hugging Face that the others or config.json determine.
        files: written with weights of Hugging Face.
    """

    tensors: int
    parameters: int
    numbers: int
    padding_rows: int
    cast: int
    left_out: int = 0
    files: int = 0

    def describe(self, dtype: torch.dtype) -> str:
        """All but the padding in one line; ``dtype`` is that of the result."""
        parts = [
            f"{self.tensors} tensors of Hugging Face, {self.parameters} parameters of Megatron",
            f"{self.numbers:,} numbers of {str(dtype).removeprefix('torch.')}",
        ]
        if self.cast:
            parts.append(f"{self.cast} tensors cast")
        if self.left_out:
            parts.append(f"{self.left_out} tensors left out that the others determine")
        if self.files:
            parts.append(f"in {self.files} file(s)")
        return ", ".join(parts)


def read_weights(
    files: WeightFiles, targets: Mapping[str, Tensor], model: DenseModel, progress: Progress
) -> TransferCounts:
    """Fill Megatron's parameters.

    Args:
        files: already found to match ``model``.
        targets: Megatron's parameters by name, all of one dtype; overwritten.

    Raises:
        ConvertError: if a shape differs, a number does not fit the dtype, or a tied output layer
            is not the embedding.
    """
    mapped = parameters(model)
    padded_vocab_size = targets["embedding.word_embeddings.weight"].shape[0]
    tensors = cast = numbers = 0
    for parameter in progress(mapped):
        sources = [files.read(name) for name in parameter.sources]
        value = to_megatron(parameter, sources, model, padded_vocab_size=padded_vocab_size)
        target = targets[parameter.name]
        if value.shape != target.shape:
            raise ConvertError(
                f"{parameter.name}: Megatron's parameter has shape {list(target.shape)}, the "
                f"weights make {list(value.shape)}"
            )
        _check_range(value, target.dtype, parameter.name)
        with torch.no_grad():
            target.copy_(value)
        tensors += len(sources)
        cast += sum(source.dtype != target.dtype for source in sources)
        numbers += sum(source.numel() for source in sources)
    return TransferCounts(
        tensors=tensors,
        parameters=len(mapped),
        numbers=numbers,
        padding_rows=padded_vocab_size - model.vocab_size,
        cast=cast,
        left_out=_check_tied_copy(files, model) + files.recomputed,
    )


def write_weights(
    directory: Path,
    values: Mapping[str, Tensor],
    model: DenseModel,
    dtype: torch.dtype,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> TransferCounts:
    """Write Megatron's parameters as the tensors of Hugging Face, one file at a time.

    Raises:
        ConvertError: if a number does not fit the dtype; nothing is written then.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    for name, value in values.items():
        _check_range(value, dtype, name)
    owners = {source: parameter for parameter in parameters(model) for source in parameter.sources}
    shapes = {source: parameter.sources[source] for source, parameter in owners.items()}
    split = split_torch_state_dict_into_shards(
        {name: torch.empty(shape, dtype=dtype, device="meta") for name, shape in shapes.items()},
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=max_file_bytes,
    )
    for file, names in split.filename_to_tensors.items():
        contents = {}
        for name in names:
            parameter = owners[name]
            sources = to_hugging_face(parameter, values[parameter.name], model)
            tensor = dict(zip(parameter.sources, sources, strict=True))[name]
            # safetensors writes whole tensors only, and no two that share memory.
            contents[name] = tensor.to(dtype).clone(memory_format=torch.contiguous_format)
        # transformers refuses files without this metadata.
        save_file(contents, directory / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX).write_text(text, encoding="utf-8")
    embedding = values["embedding.word_embeddings.weight"]
    return TransferCounts(
        tensors=len(shapes),
        parameters=len(values),
        numbers=sum(map(math.prod, shapes.values())),
        padding_rows=embedding.shape[0] - model.vocab_size,
        cast=len(shapes) if dtype != embedding.dtype else 0,
        files=len(split.filename_to_tensors),
    )


def _check_range(value: Tensor, dtype: torch.dtype, name: str) -> None:
    if unusable := int((~value.isfinite()).sum()):
        raise ConvertError(f"{name}: {unusable} of {value.numel()} numbers are NaN or infinite")
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(value.dtype).max and (value.abs() > limit).any():
        raise ConvertError(f"{name}: numbers exceed the range of {dtype}; use bfloat16")


def _check_tied_copy(files: WeightFiles, model: DenseModel) -> int:
    """How many copies of the embedding are stored beside it."""
    if not model.tie_word_embeddings or OUTPUT not in files.dtypes:
        return 0
    if not torch.equal(files.read(OUTPUT), files.read(EMBEDDING)):
        raise ConvertError(
            f"{OUTPUT} differs from {EMBEDDING}, but config.json says tie_word_embeddings true; "
            "set it to false to keep both"
        )
    return 1
