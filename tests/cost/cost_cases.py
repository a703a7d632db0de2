# SPDX-License-Identifier: Apache-2.0
"""Models and tables with known contents, and steps that several tests learn from."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from step_cases import SHAPE

from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.cost.parts import NEVER_TIMED, OF_EVERY_MODEL, Direction, Part
from sparsebalance_megatron.cost.table import CostRow, CostTable, RunIdentity
from sparsebalance_megatron.cost.work_model import features

IDENTITY = RunIdentity(
    device="cpu",
    dtype="float32",
    block_size=128,
    selection="previous-block",
    shape=replace(
        SHAPE,
        hidden_size=256,
        ffn_hidden_size=688,
        num_attention_heads=8,
        head_dim=32,
        vocab_size=1024,
    ),
)
FORWARD_MS = {
    Part.ATTENTION: (0.1, 0.01, 1e-4, 0.03, 0.0),
    Part.DENSE_ATTENTION: (0.1, 0.01, 1e-4, 0.0, 0.02),
    Part.ROUTER: (0.02, 0.003, 2e-5, 0.0, 1e-4),
    Part.LINEAR: (0.05, 0.002, 1e-3, 0.0, 0.0),
    Part.EMBEDDING: (0.01, 0.0, 1e-5, 0.0, 0.0),
    Part.HEAD: (0.3, 0.0, 4e-3, 0.0, 0.0),
}
PLANTED = CostModel(
    block_size=IDENTITY.block_size,
    ms_per_unit={
        (part, direction): tuple(factor * ms for ms in row)
        for part, row in FORWARD_MS.items()
        for direction, factor in ((Direction.FORWARD, 1.0), (Direction.BACKWARD, 2.0))
        if (part, direction) not in NEVER_TIMED
    },
    source="planted",
)
"""Coefficients of a plausible model; the router has no backward."""
MIXES = ([256], [1000], [4096], [8192, 300], [128] * 16, [77] * 9, [16384], [2048, 4096, 513])


def predict_ms(model: CostModel, part: Part, direction: Direction, rows: np.ndarray) -> np.ndarray:
    """Ms of feature vectors [..., 5], as [...]."""
    return rows @ model.coefficients_ms(part, direction)


def measured(
    model: CostModel,
    identity: RunIdentity,
    mixes: Sequence[Sequence[int]],
    *,
    budgets: Sequence[int | None] = (8,),
    slowness: float = 1.0,
    noise: float = 0.0,
) -> CostTable:
    """A table of what a model takes for micro-batches of some lengths, times log-normal noise.

    Args:
        budgets: of attention.
    """
    rng = np.random.default_rng(0)
    rows = []
    for direction, part, lengths in product(Direction, OF_EVERY_MODEL, mixes):
        for budget in budgets if part is Part.ATTENTION else (None,):
            work = features(lengths, budget or np.inf, model.block_size, model.work)
            ms = slowness * predict_ms(model, part, direction, work)
            if ms > 0:
                row = CostRow(
                    part=part,
                    direction=direction,
                    lengths_tokens=tuple(lengths),
                    budget_blocks=budget,
                    ms_median=float(ms * np.exp(noise * rng.standard_normal())),
                    ms_spread=0.01,
                    repeats=5,
                )
                rows.append(row)
    return CostTable(
        identity=identity,
        versions={"torch": "2.15.0", "megatron-core": "0.19.2"},
        date="2026-01-31",
        threads=1,
        rows=tuple(rows),
    )


def planted_table(noise: float = 0.0) -> CostTable:
    """A table of what :data:`PLANTED` takes."""
    return measured(PLANTED, IDENTITY, MIXES, budgets=(1, 4, 16, None), noise=noise)


@dataclass(frozen=True)
class Times:
    """What a learner sees of a planned step."""

    times_2RPVM: np.ndarray
    scales: StageScales
    cut_M: tuple[bool, ...] = ()

    @property
    def cut_RM(self) -> np.ndarray:
        _, ranks, *_, positions = self.times_2RPVM.shape
        return np.tile(self.cut_M or (False,) * positions, (ranks, 1))
