# SPDX-License-Identifier: Apache-2.0
"""Runs commands of `sparse-balance convert`, and reads what they left."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from harness import PROGRAMS, run_program
from torch import Tensor

WORKER = PROGRAMS / "convert_worker.py"


def run_commands(
    folder: Path, name: str, commands: Mapping[str, Sequence[str]]
) -> dict[str, dict[str, Any]]:
    """Status and output of every command; all in one process."""
    paths = [folder / f"{name}.{what}.json" for what in ("commands", "results")]
    paths[0].write_text(json.dumps(commands))
    process = run_program((str(WORKER), *map(str, paths)), folder)
    assert process.returncode == 0, process.stderr[-4000:]
    return json.loads(paths[1].read_text())


def succeeded(result: Mapping[str, Any]) -> str:
    """What the command printed."""
    assert result["status"] == 0, result["stderr"][-4000:]
    return result["stdout"]


def model_args(checkpoint: Path) -> list[str]:
    """The words of the bash array that from-hf left beside the checkpoint."""
    text = (checkpoint / "model_args.sh").read_text()
    return shlex.split(text.removeprefix("MODEL_ARGS=(").partition("\n)")[0])


def read_documents(prefix: Path, lengths_tokens: Sequence[int]) -> list[Tensor]:
    """Stored documents, of which training sees all tokens but the last."""
    stored = np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64)
    return list(torch.from_numpy(stored).split(list(lengths_tokens)))


@torch.no_grad()
def reference_logits(model: torch.nn.Module, documents: Sequence[Tensor]) -> Tensor:
    """[T, V] of documents that `transformers` sees one at a time."""
    return torch.cat([model(document[None]).logits[0] for document in documents])


def reference_loss(
    model: torch.nn.Module, documents: Sequence[Tensor], padding_rows: int = 0
) -> float:
    """Mean loss of all labels. A padding row has logit 0 in Megatron's softmax."""
    logits = reference_logits(model, [row[:-1] for row in documents])
    padded = torch.nn.functional.pad(logits, (0, padding_rows))
    labels = torch.cat([row[1:] for row in documents])
    return torch.nn.functional.cross_entropy(padded, labels).item()
