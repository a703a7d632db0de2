# SPDX-License-Identifier: Apache-2.0
"""Warnings are left out inside, and not afterwards."""

from __future__ import annotations

import ast
import logging
import warnings
from pathlib import Path

import pytest

from sparsebalance_megatron.megatron import datasets
from sparsebalance_megatron.megatron.datasets import quiet_imports


def warn(text: str) -> None:
    warnings.warn(text, UserWarning, stacklevel=2)
    logging.getLogger("torch.utils.cpp_extension").warning(text)


def test_warnings_are_left_out_inside_only(
    recwarn: pytest.WarningsRecorder, caplog: pytest.LogCaptureFixture
) -> None:
    warn("before")
    with quiet_imports():
        warn("inside")
    warn("after")
    assert [str(each.message) for each in recwarn] == ["before", "after"]
    assert caplog.messages == ["before", "after"]


def test_a_failed_import_ends_the_silence_too(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ImportError), quiet_imports():
        raise ImportError
    logging.getLogger("torch.utils.cpp_extension").warning("after")
    assert caplog.messages == ["after"]


def test_every_import_of_megatron_for_data_is_quiet() -> None:
    """A command that reads or writes data is the first to import Megatron."""
    tree = ast.parse(Path(datasets.__file__).read_text("utf-8"))
    quiet = {
        id(statement)
        for node in ast.walk(tree)
        if isinstance(node, ast.With) and "quiet_imports" in ast.dump(node.items[0])
        for statement in ast.walk(node)
    }
    imports = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron.")
    ]
    assert imports and all(id(node) in quiet for node in imports)
