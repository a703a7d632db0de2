# SPDX-License-Identifier: Apache-2.0
"""What a Megatron checkpoint may hold before it is read, and what is refused unread."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save

from sparsebalance_megatron.errors import ConvertError

EMBEDDING = "embedding.word_embeddings.weight"
FORMAT = '{"sharded_backend": "torch_dist"}'


def checkpoint(directory: Path, **tensors: torch.Tensor) -> Path:
    """A directory as --save names it, with iteration 3; its folder is returned."""
    folder = directory / "iter_0000003"
    writer = FileSystemWriter(folder)
    with pytest.warns(UserWarning):
        save({EMBEDDING: torch.ones(12, 4, dtype=torch.bfloat16)} | tensors, storage_writer=writer)
    (directory / "latest_checkpointed_iteration.txt").write_text("3")
    (folder / "metadata.json").write_text(FORMAT)
    return folder


def opened(directory: Path) -> Any:
    from sparsebalance_megatron.megatron.saved_model import SavedModel

    return SavedModel(directory, None)


def test_descriptions_are_those_that_torch_reads(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, other=torch.zeros(3, dtype=torch.int64))
    saved = opened(tmp_path)
    assert (saved.vocabulary_rows, saved.dtype, saved.path) == (12, torch.bfloat16, folder)
    assert saved._tensors == FileSystemReader(folder).read_metadata().state_dict_metadata


class Runs:
    """Unpickling it runs a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._call = function, arguments

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize("function", [os.mkdir, eval, exec, getattr, __import__, torch.load])
def test_a_pickle_that_would_run_something_is_refused(function: Any, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    ran = tmp_path / "ran"
    (folder / ".metadata").write_bytes(pickle.dumps(Runs(function, str(ran))))
    with pytest.raises(ConvertError, match="which does not belong there"):
        opened(tmp_path)
    assert not ran.exists()


@pytest.mark.parametrize("name", ["os.system", "os", "torch.load", "operator", "reduce"])
def test_what_lies_beside_the_descriptions_is_refused(name: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    for module in ("metadata", "planner"):
        raw = f"ctorch.distributed.checkpoint.{module}\n{name}\n.".encode()
        (folder / ".metadata").write_bytes(raw)
        with pytest.raises(ConvertError, match="which does not belong there"):
            opened(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", "5", '{"sharded_backend": "zarr"}', '{"sharded_backend": 5}']
)
def test_another_format_is_one_line(text: str, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / "metadata.json").write_text(text)
    with pytest.raises(ConvertError, match="not a torch_dist checkpoint") as at:
        opened(tmp_path)
    assert "\n" not in str(at.value)


@pytest.mark.parametrize("content", [b"", b"\x80", b"text", pickle.dumps([1]), b"\xff" * 99])
def test_damaged_descriptions_are_one_line(content: bytes, tmp_path: Path) -> None:
    folder = checkpoint(tmp_path)
    (folder / ".metadata").write_bytes(content)
    with pytest.raises(ConvertError, match="cannot be loaded") as at:
        opened(tmp_path)
    assert "\n" not in str(at.value)
