# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory: weights in one safetensors file or shards with an index, and the rest.

Tensors are read one at a time, and written one file at a time. The files beside the weights,
configuration and tokenizer, are carried over as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.convert.mapping import Parameter, is_recomputed
from sparsebalance_megatron.errors import ConvertError, listed
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
"""Largest file written, unless one tensor alone is larger."""

CONFIG = "config.json"
COMPANIONS = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Files that ``save_pretrained`` of a model or a tokenizer may have written."""

_SHOWN_CHARACTERS = 80
_BELONGING = "give weights and config.json of one model"

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_METADATA = {"format": "pt"}
"""transformers refuses files without it."""


class WeightFiles:
    """The tensors of a directory, by name; a context manager that holds the files open.

    Attributes:
        dtypes: of every tensor.
        recomputed: tensors that follow from config.json, and need not be read.

    Raises:
        ConvertError: if files are missing or damaged, or a tensor has a dtype that is not
            supported (quantised weights).
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._stack = ExitStack()
        self._files: dict[Path, Any] = {}
        self._where = {name: path for path in _paths(directory) for name in self._open(path)}
        self.dtypes = {name: self._dtype(name) for name in self._where}
        self.recomputed = sum(is_recomputed(name) for name in self._where)

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        return self._files[self._where[name]].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[self._where[name]].get_slice(name).get_shape())

    def check_matches(self, parameters: Sequence[Parameter], *, spare: Iterable[str] = ()) -> None:
        """Every source of the parameters is here with its shape, and nothing else.

        Args:
            spare: names that may be here or not.

        Raises:
            ConvertError: with the names.
        """
        expected = {
            name: shape
            for parameter in parameters
            for name, shape in zip(parameter.sources, parameter.shapes, strict=True)
        }
        if missing := expected.keys() - self._where.keys():
            raise ConvertError(
                f"{self._directory}: tensors are missing: {listed(missing)}; {_BELONGING}"
            )
        unknown = self._where.keys() - expected.keys() - set(spare)
        if unknown := {name for name in unknown if not is_recomputed(name)}:
            raise ConvertError(
                f"{self._directory}: tensors that config.json does not account for: "
                f"{listed(unknown)}; {_BELONGING}"
            )
        for name, shape in expected.items():
            if self.shape(name) != shape:
                raise ConvertError(
                    f"{self._directory}: {name} has shape {list(self.shape(name))}, config.json "
                    f"says {list(shape)}; {_BELONGING}"
                )

    def common_dtype(self) -> torch.dtype:
        """The narrowest dtype that holds every tensor exactly."""
        return reduce(torch.promote_types, self.dtypes.values())

    def has(self, name: str) -> bool:
        return name in self._where

    def _open(self, path: Path) -> list[str]:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ConvertError(f"{path}: {error}; copy the file again") from error
        self._files[path] = file
        return list(file.keys())

    def _dtype(self, name: str) -> torch.dtype:
        stored = self._files[self._where[name]].get_slice(name).get_dtype()
        if stored not in _DTYPES:
            raise ConvertError(
                f"{self._where[name]}: {name} is stored as {stored}; supported are "
                f"{', '.join(_DTYPES)}"
            )
        return _DTYPES[stored]


def _paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        if not (directory / WHOLE).exists():
            raise ConvertError(
                f"{directory}: neither {WHOLE} nor {INDEX}; save the model with "
                "save_pretrained (safe serialisation) first"
            )
        return [directory / WHOLE]
    names = _shards(index)
    if absent := [name for name in names if not (directory / name).exists()]:
        raise ConvertError(f"{index}: files are missing: {listed(absent)}; copy them, too")
    return [directory / name for name in names]


def _shards(index: Path) -> list[str]:
    """The files that an index names, all of them beside it."""
    try:
        values = read_json(index)
    except UnreadableFileError as error:
        raise ConvertError(
            f"{index}: {error}; save the model with save_pretrained again"
        ) from error
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConvertError(f"{index}: no weight_map; save the model with save_pretrained again")
    for name in weight_map.values():
        if (
            not isinstance(name, str)
            or name != Path(name).name
            or name in ("", "..")
            or len(name.encode("utf-8", "replace")) > 255
        ):
            raise ConvertError(
                f"{index}: weight_map names {str(name)[:_SHOWN_CHARACTERS]!r}; weights must lie "
                "beside the index, as save_pretrained puts them"
            )
    return sorted(set(weight_map.values()))


@dataclass(frozen=True, kw_only=True)
class TensorPlan:
    """A tensor to be written: ``make`` gives it when its file's turn has come."""

    name: str
    bytes: int
    make: Callable[[], Tensor]


def write_weights(
    directory: Path, tensors: Sequence[TensorPlan], *, max_file_bytes: int = MAX_FILE_BYTES
) -> int:
    """Write the tensors in their order, and an index where they fill several files.

    Returns:
        The number of files with weights.
    """
    from safetensors.torch import save_file

    files = _fill(tensors, max_file_bytes)
    weight_map: dict[str, str] = {}
    for number, plans in enumerate(files, start=1):
        name = WHOLE if len(files) == 1 else f"model-{number:05}-of-{len(files):05}.safetensors"
        save_file(_contents(plans), directory / name, metadata=_METADATA)
        weight_map |= {plan.name: name for plan in plans}
    if len(files) > 1:
        total = {"total_size": sum(plan.bytes for plan in tensors)}
        index = {"metadata": total, "weight_map": weight_map}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (directory / INDEX).write_text(text, encoding="utf-8")
    return len(files)


def _fill(tensors: Sequence[TensorPlan], max_file_bytes: int) -> list[list[TensorPlan]]:
    files: list[list[TensorPlan]] = [[]]
    filled_bytes = 0
    for plan in tensors:
        if files[-1] and filled_bytes + plan.bytes > max_file_bytes:
            files.append([])
            filled_bytes = 0
        files[-1].append(plan)
        filled_bytes += plan.bytes
    return files


def _contents(plans: Sequence[TensorPlan]) -> dict[str, Tensor]:
    """safetensors writes whole tensors only, and no two that share memory."""
    return {plan.name: plan.make().clone(memory_format=torch.contiguous_format) for plan in plans}


def copy_companions(source: Path, output: Path, dtype: torch.dtype) -> tuple[str, ...]:
    """Copy what is there of :data:`COMPANIONS`; config.json names the dtype of the new weights.

    Returns:
        The names of the files copied.
    """
    present = tuple(name for name in COMPANIONS if (source / name).is_file())
    for name in present:
        shutil.copyfile(source / name, output / name)
    _set_dtype(output / CONFIG, str(dtype).removeprefix("torch."))
    return present


def _set_dtype(path: Path, dtype: str) -> None:
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    if config.get(key) != dtype:
        config[key] = dtype
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
