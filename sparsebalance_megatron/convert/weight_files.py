# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face directory: weights in one safetensors file, or in several with an index.

Tensors are read one at a time. The files beside the weights, configuration and tokenizer, are
carried over as they are.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from functools import reduce
from pathlib import Path
from typing import Annotated, Any

import msgspec
import torch
from torch import Tensor

from sparsebalance_megatron.convert.mapping import Parameter, is_recomputed
from sparsebalance_megatron.errors import ConvertError, listed
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

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
        self._files: dict[str, Any] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for path in _paths(directory):
            self._open(path)
        self.recomputed = sum(map(is_recomputed, self.dtypes))

    def __enter__(self) -> WeightFiles:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._files[name].get_slice(name).get_shape())

    def check_matches(self, parameters: Sequence[Parameter], *, spare: Iterable[str] = ()) -> None:
        """Every source of the parameters is here with its shape, and nothing else.

        Args:
            spare: names that may be here or not.

        Raises:
            ConvertError: with the names.
        """
        expected = {
            name: shape for parameter in parameters for name, shape in parameter.sources.items()
        }
        if missing := expected.keys() - self.dtypes.keys():
            raise ConvertError(
                f"{self._directory}: tensors are missing: {listed(missing)}; {_BELONGING}"
            )
        unknown = self.dtypes.keys() - expected.keys() - set(spare)
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

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = self._stack.enter_context(safe_open(path, framework="pt", device="cpu"))
        except (OSError, SafetensorError) as error:
            raise ConvertError(f"{path}: {error}; copy the file again") from error
        for name in file.keys():  # noqa: SIM118, the file is no mapping
            stored = file.get_slice(name).get_dtype()
            if stored not in _DTYPES:
                raise ConvertError(
                    f"{path}: {name} is stored as {stored}; supported are {', '.join(_DTYPES)}"
                )
            self._files[name], self.dtypes[name] = file, _DTYPES[stored]


class _Index(msgspec.Struct):
    """Tensor -> file of an index; the files lie beside it."""

    weight_map: Annotated[
        dict[str, Annotated[str, msgspec.Meta(max_length=63, pattern=r"^[^/\x00]*[^/.\x00]$")]],
        msgspec.Meta(min_length=1),
    ]


def _paths(directory: Path) -> list[Path]:
    index = directory / INDEX
    if not index.exists():
        if not (directory / WHOLE).exists():
            raise ConvertError(f"{directory}: neither {WHOLE} nor {INDEX}; {_SAVE}")
        return [directory / WHOLE]
    try:
        names = sorted(set(read_json(index, _Index).weight_map.values()))
    except UnreadableFileError as error:
        raise ConvertError(f"{index}: {error}; {_SAVE}") from error
    if absent := [name for name in names if not (directory / name).exists()]:
        raise ConvertError(f"{index}: files are missing: {listed(absent)}; copy them, too")
    return [directory / name for name in names]


def copy_companions(source: Path, output: Path, dtype: torch.dtype) -> tuple[str, ...]:
    """Copy what is there of :data:`COMPANIONS`; config.json names the dtype of the new weights.

    Returns:
        The names of the files copied.
    """
    present = tuple(name for name in COMPANIONS if (source / name).is_file())
    for name in present:
        shutil.copyfile(source / name, output / name)
    path, name = output / CONFIG, str(dtype).removeprefix("torch.")
    config = json.loads(path.read_text(encoding="utf-8"))
    key = "torch_dtype" if "torch_dtype" in config and "dtype" not in config else "dtype"
    if config.get(key) != name:
        config[key] = name
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return present
