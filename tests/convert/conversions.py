# SPDX-License-Identifier: Apache-2.0
"""Runs commands of `sparse-balance convert`, and reads what they left."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from convert.tiny_models import VOCABULARY, stored_tensors
from harness import (
    BALANCE_FLAGS,
    PROGRAMS,
    TRAINING_FLAGS,
    TrainingRun,
    run_program,
    run_training,
    write_documents,
)
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

WORKER = PROGRAMS / "convert_worker.py"
DOCUMENT_LENGTHS = [150, 40, 90, 17, 200, 33, 120, 64]
"""Stored tokens; together they are one global batch."""


class Conversions:
    """Models, checkpoints and runs by name, each in a folder of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.documents = write_documents(root / "train", DOCUMENT_LENGTHS, vocabulary=VOCABULARY)

    def hf(self, name: str) -> Path:
        return self.root / "hf" / name

    def checkpoint(self, name: str) -> Path:
        return self.root / "checkpoints" / name

    def trained(self, name: str) -> Path:
        return self.root / "trained" / name

    def exported(self, name: str) -> Path:
        return self.root / "exported" / name

    def export(self, name: str, variant: str, *more: str) -> tuple[str, ...]:
        """The command that exports what a run trained."""
        output = ("--output", str(self.exported(name)), "--hf-config", str(self.hf(variant)))
        return ("convert", "to-hf", str(self.trained(name)), *output, *more)

    def train(
        self,
        name: str,
        variant: str,
        *flags: str,
        program: tuple[str, ...] = ("-m", "sparsebalance_megatron.pretrain_gpt"),
    ) -> TrainingRun:
        """Train the converted checkpoint of a variant on two ranks, with fixed budgets."""
        own = (
            *(*model_args(self.checkpoint(variant)), *TRAINING_FLAGS, *BALANCE_FLAGS),
            *("--sparse-balance-tuning", "off", "--seq-length", "256"),
            *("--tokenizer-type", "NullTokenizer", "--data-path", str(self.documents)),
            *("--load", str(self.checkpoint(variant)), "--finetune", "--ckpt-format", "torch_dist"),
            *("--save", str(self.trained(name)), *flags),
        )
        log_dir = self.trained(name) / "log"
        return run_training(2, own, log_dir=log_dir, program=program).require_success()

    def run(self, name: str, commands: Mapping[str, Sequence[str]]) -> dict[str, dict[str, Any]]:
        """Status and output of every command; all in one process."""
        paths = [self.root / f"{name}.{what}.json" for what in ("commands", "results")]
        paths[0].write_text(json.dumps(commands))
        process = run_program((str(WORKER), *map(str, paths)), self.root)
        assert process.returncode == 0, process.stderr[-4000:]
        return json.loads(paths[1].read_text())


def succeeded(result: Mapping[str, Any]) -> str:
    """What the command printed."""
    assert result["status"] == 0, result["stderr"][-4000:]
    return result["stdout"]


def assert_came_back(exported: Path, model: torch.nn.Module) -> None:
    """To the bit, in tensors named as `transformers` names them, which it reads."""
    written, expected = load_file(exported / "model.safetensors"), stored_tensors(model)
    assert written.keys() == expected.keys()
    loaded = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    for came, went in ((written, expected), (loaded, model.state_dict())):
        for name, weight in went.items():
            assert came[name].dtype == weight.dtype
            assert torch.equal(came[name], weight), name


def model_args(checkpoint: Path) -> list[str]:
    """The words of the bash array that from-hf left beside the checkpoint."""
    text = (checkpoint / "model_args.sh").read_text()
    return shlex.split(text.removeprefix("MODEL_ARGS=(").partition("\n)")[0])


def read_documents(prefix: Path) -> list[Tensor]:
    """Stored documents, of which training sees all tokens but the last."""
    stored = np.fromfile(f"{prefix}.bin", dtype=np.uint16).astype(np.int64)
    return list(torch.from_numpy(stored).split(DOCUMENT_LENGTHS))


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
