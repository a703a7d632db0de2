# SPDX-License-Identifier: Apache-2.0
"""Jobs that tests predict."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.memory import MemoryModel
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.models import MODELS
from sparsebalance_megatron.predict.scenario import Scenario


def memory_of(job: Job) -> MemoryModel:
    return MemoryModel(
        shape=MODELS["qwen2.5-0.5b"].shape,
        layers_per_stage=tuple(sum(map(len, stage)) for stage in job.stage_layers),
        virtual_stages=job.virtual_stages,
        tied_embeddings=True,
        sequence_parallel=True,
        optimizer_ranks=job.data_parallel_size,
    )


def scenario(**changes: Any) -> Scenario:
    """A small model on two ranks of two stages with blocks of 128 tokens."""
    settings = {"block_size": 128, "base_budget": 8, "dense_up_to": "0"} | changes.pop("config", {})
    values: dict[str, Any] = {
        "model": MODELS["qwen2.5-0.5b"],
        "ranks": 2,
        "stages": 2,
        "micro_batches": 4,
        "cap_tokens": 8192,
        "longest_tokens": 8192,
    }
    return Scenario(config=SparseBalanceConfig(**settings), **(values | changes))


def write_job_lengths(path: Path) -> Path:
    """4,000 lognormal lengths: median 3,900, sigma 1.1, at most 65,536."""
    normal = np.random.default_rng(0).standard_normal(4000)
    lengths = np.clip(3900 * np.exp(1.1 * normal), 16, 65536).astype(int)
    path.write_text("\n".join(map(str, lengths)))
    return path
