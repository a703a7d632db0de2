# SPDX-License-Identifier: Apache-2.0
"""Moves weights between a Hugging Face directory and Megatron's parameters, and counts them.

A directory has one safetensors file, or several with an index. Tensors are read one at a time,
files written one at a time. Configuration and tokenizer are carried over.
"""

import errno
import json
import math
import shutil
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from sparsebalance_megatron.convert.hf_config import Decoder
from sparsebalance_megatron.convert.mapping import (
    EMBEDDING,
    OUTPUT,
    Parameter,
    experts_in,
    is_recomputed,
    parameters,
    tensor_shapes,
    to_hugging_face,
    to_megatron,
)
from sparsebalance_megatron.errors import ConvertError, listed
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

MAX_FILE_BYTES = 5 * 10**9
"""Largest file written, unless one tensor alone is larger."""


@dataclass(frozen=True, kw_only=True)
class TransferCounts:
    """Counts of a conversion of all of a model's tensors.

    ``padding_rows``, of zeros, were added to each matrix of the vocabulary or dropped from it.
    ``cast``: tensors whose dtype changed. ``left_out``: those that the others or config.json
    determine.
    """

    model: Decoder
    padding_rows: int
    cast: int
    left_out: int = 0
    files: int = 0

    def describe(self, dtype: torch.dtype) -> str:
        shapes, mapped = tensor_shapes(self.model), parameters(self.model)
        numbers = sum(map(math.prod, shapes.values()))
        parts = [
            f"{len(shapes)} tensors of Hugging Face, {len(mapped)} parameters of Megatron",
            f"{numbers:,} numbers of {str(dtype).removeprefix('torch.')}",
        ]
        if self.cast:
            parts.append(f"{self.cast} tensors cast")
        if self.left_out:
            parts.append(f"{self.left_out} tensors left out that the others determine")
        if self.files:
            parts.append(f"in {self.files} file(s)")
        return ", ".join(parts)


def read_weights(
    files: "WeightFiles",
    targets: Mapping[str, Tensor],
    model: Decoder,
    mapped: Iterable[Parameter],
) -> TransferCounts:
    """Overwrite Megatron's parameters by name, all of one dtype, from files that match the model,
    whose ``mapped`` parameters may come with a bar of progress.

    Raises:
        ConvertError: a shape differs, a number does not fit, or a tied output layer is another.
    """
    embedding = targets["embedding.word_embeddings.weight"]
    padded_vocab_size = embedding.shape[0]
    for parameter in mapped:
        sources = [files.tensors[name].read() for name in parameter.sources]
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
    stored = (files.tensors[name].dtype for name in tensor_shapes(model))
    return TransferCounts(
        model=model,
        padding_rows=padded_vocab_size - model.vocab_size,
        cast=sum(dtype != embedding.dtype for dtype in stored),
        left_out=_check_tied_copy(files, model) + files.recomputed,
    )


def write_weights(
    directory: Path,
    values: Mapping[str, Tensor],
    model: Decoder,
    dtype: torch.dtype,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> TransferCounts:
    """Write Megatron's parameters as the tensors of Hugging Face, one file at a time.

    Raises:
        ConvertError: if a number does not fit the dtype; nothing is written then.
        OSError: if a file cannot be written.
    """
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for name, value in values.items():
        _check_range(value, dtype, name)
    owners = {source: parameter for parameter in parameters(model) for source in parameter.sources}
    shapes = tensor_shapes(model)
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
        try:
            save_file(contents, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(errno.EIO, str(error), str(directory / file)) from error
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX).write_text(text, encoding="utf-8")
    embedding = values["embedding.word_embeddings.weight"]
    return TransferCounts(
        model=model,
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


def _check_tied_copy(files: "WeightFiles", model: Decoder) -> int:
    """Count the copies of the embedding that are stored beside it."""
    if not model.tie_word_embeddings or OUTPUT not in files.tensors:
        return 0
    if not torch.equal(files.tensors[OUTPUT].read(), files.tensors[EMBEDDING].read()):
        raise ConvertError(
            f"{OUTPUT} differs from {EMBEDDING}, but config.json says tie_word_embeddings true; "
            "set it to false to keep both"
        )
    return 1


WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

CONFIG = "config.json"
COMPANIONS = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Files that ``save_pretrained`` of a model or a tokenizer may have written."""

_BELONGING = "give weights and config.json of one model"
_SAVE = "save the model with save_pretrained (safe serialisation) first"
_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor at a place inside one that a file holds."""

    path: Path
    file: Any
    name: str
    place: tuple[int | slice, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self) -> Tensor:
        tensor: Tensor = self.file.get_slice(self.name)[self.place]
        return tensor


class WeightFiles(ExitStack):
    """The tensors of a directory, by name; a context manager that holds the files open.

    ``recomputed`` counts those that follow from config.json, and need not be read.

    Raises:
        ConvertError: files are missing or damaged, or weights quantised.
    """

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self.tensors: dict[str, StoredTensor] = {}
        for path in _paths(directory):
            self._open(path)
        self.recomputed = sum(map(is_recomputed, self.tensors))

    def check_matches(self, model: Decoder) -> None:
        """Raise, with the names, unless every tensor of the model is here with its shape, and
        nothing else but a copy of a tied embedding."""
        expected = tensor_shapes(model)
        spare = {OUTPUT} if model.tie_word_embeddings else set()
        if missing := expected.keys() - self.tensors.keys():
            raise ConvertError(
                f"{self._directory}: tensors are missing: {listed(missing)}; {_BELONGING}"
            )
        unknown = self.tensors.keys() - expected.keys() - spare
        if unknown := {name for name in unknown if not is_recomputed(name)}:
            raise ConvertError(
                f"{self._directory}: tensors that config.json does not account for: "
                f"{listed(unknown)}; {_BELONGING}"
            )
        for name, shape in expected.items():
            if (stored := self.tensors[name].shape) != shape:
                raise ConvertError(
                    f"{self._directory}: {name} has shape {list(stored)}, config.json says "
                    f"{list(shape)}; {_BELONGING}"
                )

    def common_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every tensor exactly."""
        return reduce(torch.promote_types, (tensor.dtype for tensor in self.tensors.values()))

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ConvertError(f"{path}: {error}; copy the file again") from error
        for name in file.keys():  # noqa: SIM118, the file is no mapping
            tensor = file.get_slice(name)
            dtype, shape = tensor.get_dtype(), tuple(tensor.get_shape())
            if dtype not in _DTYPES:
                raise ConvertError(
                    f"{path}: {name} is stored as {dtype}; supported are {', '.join(_DTYPES)}"
                )
            parts = experts_in(name, shape) or {name: ((slice(None),), shape)}
            for part, (place, part_shape) in parts.items():
                if other := self.tensors.get(part):
                    raise ConvertError(
                        f"{path}: {part} is in {other.path.name}, too; remove the file of another "
                        "model"
                    )
                self.tensors[part] = StoredTensor(
                    path=path,
                    file=file,
                    name=name,
                    place=place,
                    shape=part_shape,
                    dtype=_DTYPES[dtype],
                )


class _Index(msgspec.Struct):
    """Tensor -> file of an index; the files lie beside it."""

    weight_map: dict[str, str]


def _paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        if not (directory / WHOLE).exists():
            raise ConvertError(f"{directory}: neither {WHOLE} nor {INDEX}; {_SAVE}")
        return [directory / WHOLE]
    try:
        names = set(read_json(index, _Index).weight_map.values())
    except UnreadableFileError as error:
        raise ConvertError(f"{index}: {error}; {_SAVE}") from error
    if WHOLE not in names and (directory / WHOLE).exists():
        raise ConvertError(
            f"{directory}: {WHOLE} and {INDEX} are two sets of weights; remove one (transformers "
            f"reads {WHOLE})"
        )
    if absent := names - {path.name for path in directory.iterdir()}:
        raise ConvertError(f"{index}: files are missing: {listed(absent)}; copy them, too")
    return [directory / name for name in sorted(names)]


def copy_companions(
    source: Path, output: Path, dtype: torch.dtype, own_keys: Mapping[str, Any]
) -> tuple[str, ...]:
    """Copy what is there of :data:`COMPANIONS`; config.json names the dtype of the new weights, and
    has ``own_keys`` in place of its own, None for keys that fall away.

    It also says RoPE and experts in the keys of ``transformers`` 4, which takes defaults for what
    only those of 5 say. The names of the files copied are returned.
    """
    present = tuple(name for name in COMPANIONS if (source / name).is_file())
    for name in present:
        shutil.copyfile(source / name, output / name)
    path = output / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    changed = _keys_of_transformers_4(config) | config | {key: str(dtype).removeprefix("torch.")}
    kept = {name: value for name, value in changed.items() if name not in own_keys}
    changed = kept | {name: value for name, value in own_keys.items() if value is not None}
    if changed != config:
        path.write_text(json.dumps(changed, indent=2) + "\n", encoding="utf-8")
    return present


def _keys_of_transformers_4(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config.get("rope_parameters") or {})
    keys = {
        "rope_theta": rope.pop("rope_theta", None),
        "num_experts": config.get("num_local_experts"),
    }
    if rope.get("rope_type", "default") != "default":
        keys["rope_scaling"] = rope
    return {key: value for key, value in keys.items() if value is not None}
