# SPDX-License-Identifier: Apache-2.0
"""Data and flags of a soak: a small model, whose checkpoint's files outgrow its logs."""

from pathlib import Path

import numpy as np

_VOCABULARY = 256
_LONGEST_TOKENS = 250


def write_documents(prefix: Path, *, seed: int) -> Path:
    """A .bin/.idx pair of documents of very different lengths, with small tokens more frequent."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder, get_idx_path

    if Path(f"{prefix}.idx").exists():
        return prefix
    generator = np.random.default_rng(seed)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for drawn in generator.lognormal(np.log(_LONGEST_TOKENS / 6), 0.9, 400):
        length = int(np.clip(drawn, 4, _LONGEST_TOKENS))
        builder.add_document(
            (generator.random(length) ** 3 * (_VOCABULARY - 1)).astype(np.uint16), [length]
        )
    builder.finalize(get_idx_path(str(prefix)))
    return prefix


def flags(directory: Path, data: Path, steps: int, save_every: int) -> list[str]:
    """Resumes from what ``directory`` holds."""
    checkpoints = str(directory / "checkpoints")
    return [
        *("--num-layers", "2", "--hidden-size", "256", "--ffn-hidden-size", "512"),
        *("--num-attention-heads", "2", "--seq-length", "256", "--max-position-embeddings", "256"),
        *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu"),
        *("--disable-bias-linear", "--untie-embeddings-and-output-weights"),
        *("--attention-dropout", "0", "--hidden-dropout", "0"),
        *("--tokenizer-type", "NullTokenizer", "--vocab-size", str(_VOCABULARY - 1)),
        *("--pipeline-model-parallel-size", "2", "--micro-batch-size", "1"),
        *("--global-batch-size", "4", "--train-iters", str(steps)),
        *("--lr", "1e-3", "--lr-decay-style", "constant", "--clip-grad", "1.0"),
        *("--log-interval", "1", "--seed", "1234", "--split", "90,10,0"),
        *("--eval-iters", "1", "--eval-interval", str(2 * save_every)),
        *("--data-path", str(data), "--ckpt-format", "torch_dist"),
        *("--save", checkpoints, "--load", checkpoints, "--save-interval", str(save_every)),
        *("--sparse-balance", "--sparse-balance-device", "cpu"),
        *("--sparse-balance-block-size", "16", "--sparse-balance-base-budget", "4"),
        *("--sparse-balance-config", "calibration=off"),
        *("--sparse-balance-log-dir", str(directory / "logs")),
    ]
