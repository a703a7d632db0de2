# SPDX-License-Identifier: Apache-2.0
"""Move weights one tensor at a time, and count them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsebalance_megatron.convert.dense_model import DenseModel
from sparsebalance_megatron.convert.mapping import (
    EMBEDDING,
    OUTPUT,
    Parameter,
    parameters,
    to_hugging_face,
    to_megatron,
)
from sparsebalance_megatron.convert.weight_files import TensorPlan, WeightFiles
from sparsebalance_megatron.errors import ConvertError

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
    """

    tensors: int
    parameters: int
    numbers: int
    padding_rows: int
    cast: int
    left_out: int


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
    cast = numbers = 0
    for parameter in progress(mapped):
        sources = [files.read(name) for name in parameter.sources]
        value = to_megatron(parameter, sources, model, padded_vocab_size=padded_vocab_size)
        _copy(value, targets[parameter.name], parameter.name)
        cast += sum(source.dtype != targets[parameter.name].dtype for source in sources)
        numbers += sum(source.numel() for source in sources)
    return TransferCounts(
        tensors=sum(len(parameter.sources) for parameter in mapped),
        parameters=len(mapped),
        numbers=numbers,
        padding_rows=padded_vocab_size - model.vocab_size,
        cast=cast,
        left_out=_check_tied_copy(files, model) + files.recomputed,
    )


def _copy(value: Tensor, target: Tensor, name: str) -> None:
    if value.shape != target.shape:
        raise ConvertError(
            f"{name}: Megatron's parameter has shape {list(target.shape)}, the weights make "
            f"{list(value.shape)}"
        )
    _check_range(value, target.dtype, name)
    with torch.no_grad():
        target.copy_(value)


def _check_range(value: Tensor, dtype: torch.dtype, name: str) -> None:
    limit = torch.finfo(dtype).max
    if limit < torch.finfo(value.dtype).max and (value.isfinite() & (value.abs() > limit)).any():
        raise ConvertError(f"{name}: numbers exceed the range of {dtype}; use bfloat16")


def _check_tied_copy(files: WeightFiles, model: DenseModel) -> int:
    """How many copies of the embedding are stored beside it."""
    if not model.tied or not files.has(OUTPUT):
        return 0
    if not torch.equal(files.read(OUTPUT), files.read(EMBEDDING)):
        raise ConvertError(
            f"{OUTPUT} differs from {EMBEDDING}, but config.json says tie_word_embeddings true; "
            "set it to false to keep both"
        )
    return 1


def plan_weights(
    values: Mapping[str, Tensor], model: DenseModel, dtype: torch.dtype
) -> tuple[TensorPlan, ...]:
    """The tensors of Hugging Face that Megatron's parameters make, in the order of the layers.

    Raises:
        ConvertError: if a number does not fit the dtype.
    """
    for name, value in values.items():
        _check_range(value, dtype, name)
    bytes_per_number = torch.empty((), dtype=dtype).element_size()
    return tuple(
        TensorPlan(
            name=name,
            bytes=math.prod(shape) * bytes_per_number,
            make=partial(_source, parameter, values[parameter.name], model, place, dtype),
        )
        for parameter in parameters(model)
        for place, (name, shape) in enumerate(zip(parameter.sources, parameter.shapes, strict=True))
    )


def _source(
    parameter: Parameter, value: Tensor, model: DenseModel, place: int, dtype: torch.dtype
) -> Tensor:
    return to_hugging_face(parameter, value, model)[place].to(dtype)
