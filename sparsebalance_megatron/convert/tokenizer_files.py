# SPDX-License-Identifier: Apache-2.0
"""The files beside the weights: configuration and tokenizer, carried over as they are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch

CONFIG = "config.json"
COMPANIONS = (
    *(CONFIG, "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("tokenizer.model", "chat_template.jinja", "chat_template.json"),
)
"""Files that ``save_pretrained`` of a model or a tokenizer may have written."""


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
