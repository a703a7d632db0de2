# SPDX-License-Identifier: Apache-2.0
"""A step's figures as scalars for TensorBoard and W&B; docs/TELEMETRY.md lists them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sparsebalance_megatron.cost.model import training_flops
from sparsebalance_megatron.cost.table import ModelShape
from sparsebalance_megatron.log.recording import FinishedStep

PREFIX = "sparse-balance"
MISMATCHES = "digest-mismatches"
LOG_LINE = ("imbalance", "predicted_to_measured", "coverage", "tuned_samples")
"""Figures in the trainer's log line, which hands them to its writers."""
COUNTS_IN_LOG_LINE = ("unobserved", "attended_again", "recomputed_otherwise")
"""Figures that are there only where they are not zero."""


class ScalarWriter:
    """Writes to Megatron's own writers, on the rank that has them.

    Args:
        tensorboard: a ``SummaryWriter``, or None.
        wandb: what has a ``log(values, step)`` like wandb, or None.
        interval: iterations from one writing to the next.
    """

    def __init__(self, tensorboard: Any, wandb: Any, *, interval: int) -> None:
        self._tensorboard = tensorboard
        self._wandb = wandb
        self._interval = interval

    def due(self, iteration: int) -> bool:
        """Whether Megatron logs this iteration."""
        return iteration % self._interval == 0

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Write the values, under :data:`PREFIX`."""
        named = {f"{PREFIX}/{name}": value for name, value in values.items()}
        if self._tensorboard is not None:
            for name, value in named.items():
                self._tensorboard.add_scalar(name, value, iteration)
        if self._wandb is not None:
            self._wandb.log(named, iteration)


def step_scalars(
    step: FinishedStep, *, shape: ModelShape, block_size: int, world_size: int
) -> dict[str, float]:
    """Name -> value of everything that was measured and is not in the log line."""
    plan = step.planned.plan
    lengths_S = np.array([length for each in plan.micro_batches for length in each.lengths_tokens])
    budgets_LS = np.concatenate([each.budgets_LS for each in plan.micro_batches], axis=1)
    executed, dense = (
        training_flops(
            shape,
            layers=len(budgets_LS),
            lengths_tokens_S=lengths_S,
            budgets_LS=budgets,
            block_size=block_size,
        )
        for budgets in (budgets_LS, None)
    )
    values = {"plan-ms": step.planned.plan_ms, "host-ms": sum(step.host_ms.values())}
    if step.iteration_ms is not None:
        # 1e9 per ms is 1e12 per second.
        per_rank = step.iteration_ms * 1e9 * world_size
        values |= {
            "tokens-per-second": step.measured.tokens / step.iteration_ms * 1e3,
            "tflops-per-rank-executed": executed / per_rank,
            "tflops-per-rank-dense-equivalent": dense / per_rank,
        }
    logged = {name.replace("_", "-") for name in (*LOG_LINE, *COUNTS_IN_LOG_LINE)}
    others = {name: of for name, of in step.figures.scalars() if name not in logged}
    return others | values
