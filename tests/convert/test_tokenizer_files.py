# SPDX-License-Identifier: Apache-2.0
"""The files beside the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sparsebalance_megatron.convert.tokenizer_files import copy_companions


@pytest.mark.parametrize(
    ("stored", "key", "dtype"),
    [
        ({"dtype": "float32", "x": 1}, "dtype", "bfloat16"),
        ({"torch_dtype": "float32"}, "torch_dtype", "float16"),
        ({"x": 1}, "dtype", "float32"),
    ],
)
def test_companions_are_copied_and_the_dtype_follows_the_weights(
    stored: dict, key: str, dtype: str, tmp_path: Path
) -> None:
    source, output = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    output.mkdir()
    (source / "config.json").write_text(json.dumps(stored))
    (source / "tokenizer.json").write_text("tokens")
    (source / "README.md").write_text("not copied")
    copied = copy_companions(source, output, getattr(torch, dtype))
    assert copied == ("config.json", "tokenizer.json")
    assert sorted(path.name for path in output.iterdir()) == sorted(copied)
    assert json.loads((output / "config.json").read_text()) == stored | {key: dtype}
    assert (output / "tokenizer.json").read_text() == "tokens"
