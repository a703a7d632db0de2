# SPDX-License-Identifier: Apache-2.0
"""Save and load a whole model as a ``torch_dist`` checkpoint of Megatron, in one process.

Import only after the CPU adapter has been installed.
"""

import errno
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor, apply_factories
from megatron.training.checkpointing import save_checkpoint
from megatron.training.global_vars import set_global_variables
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from sparsebalance_megatron.errors import ConvertError, listed
from sparsebalance_megatron.json_file import UnreadableFileError, open_regular, read_json, read_text

_MAX_ITERATION_DIGITS = 12
_OPTIMIZER = re.compile(r"(chained_\d+\.)?optimizer\.")
_EMBEDDING = "embedding.word_embeddings.weight"


def save_release(args: Namespace, model: Any, directory: Path) -> None:
    """Write ``directory`` as Megatron writes a release: a checkpoint of iteration 0, without
    optimizer and random state. Raises an :class:`OSError` where it cannot be written, whose reason
    Megatron's worker processes keep to themselves."""
    args.save = str(directory)
    set_global_variables(args, build_tokenizer=False)
    needed = sum(each.numel() * each.element_size() for each in model.parameters())
    try:
        save_checkpoint(0, [model], None, None, 0, release=True)
    except CheckpointException as error:
        free = shutil.disk_usage(directory).free
        what = f"{needed:,} bytes of weights, {free:,} bytes are free there"
        raise OSError(errno.ENOSPC if free < needed else errno.EIO, what) from error


class _Format(msgspec.Struct):
    """Fields of Megatron's metadata.json that a readable checkpoint has."""

    sharded_backend: Literal["torch_dist"]


_CHECKPOINT = "torch.distributed.checkpoint"
_METADATA_NAMES = {
    f"{_CHECKPOINT}.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo",),
    "torch": ("Size", *(name for name, value in vars(torch).items() if type(value) is torch.dtype)),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("PosixPath",),
}


class _MetadataReader(pickle.Unpickler):
    """Reads ``.metadata``, a pickle, and refuses what does not describe tensors, before Megatron
    unpickles the file."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _METADATA_NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it names {module}.{name}, which does not belong there")
        return super().find_class(module, name)


class SavedModel:
    """The model's tensors of one iteration of a checkpoint directory; None takes the latest.

    ``arguments`` are Megatron's, of the run that wrote it; known after :meth:`load`.
    """

    def __init__(self, directory: Path, iteration: int | None) -> None:
        try:
            self.path = directory / (
                f"iter_{iteration:07}" if iteration is not None else _latest(directory)
            )
            read_json(self.path / "metadata.json", _Format)
        except UnreadableFileError as error:
            what = "the latest iteration" if iteration is None else f"iteration {iteration}"
            raise ConvertError(
                f"{directory}: {what} is not a torch_dist checkpoint ({error}); "
                "give a directory that --save named in a run with --ckpt-format torch_dist"
            ) from error
        with _undamaged(self.path), open_regular(self.path / ".metadata") as stream:
            stored = _MetadataReader(stream).load().state_dict_metadata
        self._tensors = {
            name: tensor
            for name, tensor in stored.items()
            if isinstance(tensor, TensorStorageMetadata)
        }
        self.arguments: Namespace | None = None

    @property
    def vocabulary_rows(self) -> int:
        """Rows of the embedding, padding included."""
        return int(self._embedding().size[0])

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the parameters."""
        return self._embedding().properties.dtype

    def load(self, model: Any) -> dict[str, Tensor]:
        """The values of all parameters, by their names in ``model``, which is overwritten."""
        with _undamaged(self.path):
            self._check_matches(_without_extra_state(self._sharded(model)))
            requested = _without_extra_state(self._sharded(model))
            loaded = dist_checkpointing.load({"model": requested}, str(self.path))
        self.arguments = loaded.get("args")
        return loaded["model"]

    def _embedding(self) -> TensorStorageMetadata:
        if _EMBEDDING not in self._tensors:
            raise ConvertError(f"{self.path}: no {_EMBEDDING}; it does not hold a GPT model")
        return self._tensors[_EMBEDDING]

    def _sharded(self, model: Any) -> dict[str, Any]:
        """State for the model to load, in the layout that the checkpoint was written with."""
        metadata = dist_checkpointing.load_content_metadata(str(self.path)) or {}
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return model.sharded_state_dict(metadata={**metadata, "dp_cp_group": group})

    def _check_matches(self, sharded: dict[str, Any]) -> None:
        apply_factories(sharded)
        asked = {
            tensor.key: tensor
            for tensor in nested_values(sharded)
            if isinstance(tensor, ShardedTensor)
        }
        stored = {name for name in self._tensors if not _OPTIMIZER.match(name)}
        if missing := asked.keys() - stored:
            raise ConvertError(f"{self.path}: tensors are missing: {listed(missing)}")
        if unknown := stored - asked.keys():
            raise ConvertError(
                f"{self.path}: tensors that --hf-config does not account for: {listed(unknown)}"
            )
        for name, tensor in asked.items():
            shape, expected = self._tensors[name].size, tensor.global_shape
            if tuple(shape) != tuple(expected):
                raise ConvertError(
                    f"{self.path}: {name} has shape {list(shape)}, --hf-config makes it "
                    f"{list(expected)}"
                )


def _latest(directory: Path) -> str:
    """The folder of the latest iteration; Megatron's own reader ends the process in silence."""
    tracker = directory / "latest_checkpointed_iteration.txt"
    content = read_text(tracker).strip()
    if content == "release":
        return content
    if not (content.isdecimal() and len(content) <= _MAX_ITERATION_DIGITS):
        raise ConvertError(
            f"{tracker}: holds {content[:60]!r}, neither an iteration nor 'release'; choose a "
            "checkpoint with --iteration"
        )
    return f"iter_{int(content):07}"


@contextmanager
def _undamaged(path: Path) -> Iterator[None]:
    """Turn every exception of torch and pickle at damaged files into one line."""
    try:
        yield
    except ConvertError:
        raise
    except (Exception, CheckpointException) as error:
        lines = str(error).strip().splitlines() or [""]
        raise ConvertError(
            f"{path}: cannot be loaded ({type(error).__name__}: {lines[0][:200]}); copy the "
            "checkpoint again, or choose another with --iteration"
        ) from error


def _without_extra_state(sharded: dict[str, Any]) -> dict[str, Any]:
    """Tensors only: extra states hold the FP8 history of Transformer Engine, or nothing."""
    return {name: value for name, value in sharded.items() if not isinstance(value, ShardedObject)}
