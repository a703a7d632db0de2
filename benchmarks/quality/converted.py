# SPDX-License-Identifier: Apache-2.0
"""Scores of a trained model in ``transformers``, label by label beside those of training's own.

The checkpoint goes through ``sparse-balance convert to-hf``. Documents are read in batches that are
padded on the right.

Shape legend: B documents of a batch, T their tokens with padding, W words of the vocabulary, X
scored labels.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from itertools import batched
from pathlib import Path
from typing import Any

import numpy as np
import torch
from end_to_end.launch import environment
from torch.nn.utils.rnn import pad_sequence

from quality.documents import Document
from quality.run_spec import RunSpec
from quality.tasks import Task, held_out_documents

_BATCH_SIZE = 16


def labels_file(spec: RunSpec, task: Task, rank: int) -> Path:
    """What training's own evaluation made of every label of a rank's documents."""
    return spec.folder / f"labels_{task.name}_{rank}.npz"


def compare(spec: RunSpec) -> dict[str, Any]:
    """Score a kept model in ``transformers``.

    Returns:
        By task and reading: ``labels``; how many of them are ``right`` here and
        ``right_in_training``; how many are right in one of the two alone, ``otherwise``; and the
        ``loss_difference`` of the label where it is largest.
    """
    from sparsebalance_megatron import evaluate

    model, found = converted_model(spec), {}
    for task in spec.study.tasks:
        documents = held_out_documents(spec.study, task, spec.seed, spec.share)
        parts = [np.load(labels_file(spec, task, rank)) for rank in range(spec.ranks)]
        found[task.name] = {}
        for reading, budget in spec.readings.items():
            model.set_attn_implementation("sdpa" if budget is None else evaluate.NAME)
            if budget is not None:
                assert evaluate.settings_of(model.config).sparse_topk_blocks == budget
            scored = [scores(model, documents[rank :: spec.ranks]) for rank in range(spec.ranks)]
            here = {name: np.concatenate([each[name] for each in scored]) for name in scored[0]}
            there = {
                name: np.concatenate([part[f"{reading}_{name}"] for part in parts]) for name in here
            }
            found[task.name][reading] = {
                "labels": len(here["right"]),
                "right": int(here["right"].sum()),
                "right_in_training": int(there["right"].sum()),
                "otherwise": int((here["right"] != there["right"]).sum()),
                "loss_difference": float(np.abs(here["loss"] - there["loss"]).max()),
            }
    return found


def converted_model(spec: RunSpec) -> Any:
    """What ``sparse-balance convert to-hf`` makes of the checkpoint, in ``transformers``."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    study, output = spec.study, spec.folder / "hugging_face"
    if not output.exists():
        config = LlamaConfig(
            num_hidden_layers=study.layers,
            hidden_size=64,
            intermediate_size=256,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=study.vocabulary,
            max_position_embeddings=study.longest_tokens,
            rms_norm_eps=1e-5,
            dtype="float32",
        )
        config.save_pretrained(spec.folder / "hf_config")
        subprocess.run(
            [
                *(sys.executable, "-m", "sparsebalance_megatron.cli", "convert", "to-hf"),
                *(str(spec.checkpoints), "--output", str(output)),
                *("--hf-config", str(spec.folder / "hf_config")),
            ],
            env=environment("cpu"),
            check=True,
        )
    return AutoModelForCausalLM.from_pretrained(output).eval()


@torch.no_grad()
def scores(model: Any, documents: Sequence[Document]) -> dict[str, np.ndarray]:
    """``right`` and ``loss``, [X] in the order of the documents."""
    right, loss = [], []
    for some in batched(documents, _BATCH_SIZE):
        tokens_BT = pad_sequence([torch.from_numpy(each.tokens[:-1]).long() for each in some], True)
        labels_BT = pad_sequence([torch.from_numpy(each.tokens[1:]).long() for each in some], True)
        length_B1 = torch.tensor([[len(each.scored)] for each in some])
        mask_BT = (torch.arange(tokens_BT.shape[1]) < length_B1).long()
        scored_BT = pad_sequence([torch.from_numpy(each.scored) for each in some], True, False)
        logits_XW = model(tokens_BT, attention_mask=mask_BT).logits[scored_BT].float()
        label_X = labels_BT[scored_BT]
        right.append((logits_XW.argmax(-1) == label_X).double())
        loss.append(torch.nn.functional.cross_entropy(logits_XW, label_X, reduction="none"))
    return {"right": torch.cat(right).numpy(), "loss": torch.cat(loss).double().numpy()}
