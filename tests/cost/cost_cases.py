# SPDX-License-Identifier: Apache-2.0
"""Tables of what a model predicts, and steps that several tests learn from or compare with."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from sparsebalance_megatron.cost.model import CostModel, StageScales
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import CostRow, CostTable, RunIdentity


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
    for direction in Direction:
        for part in (part for part in Part if part is not Part.EXPERTS):
            for lengths in mixes:
                for budget in budgets if part is Part.ATTENTION else (None,):
                    row = CostRow(
                        part=part,
                        direction=direction,
                        lengths_tokens=tuple(lengths),
                        budget_blocks=budget,
                        ms_median=1.0,
                        ms_spread=0.01,
                        repeats=5,
                    )
                    features = row.features(model.block_size, model.work)
                    ms = slowness * predict_ms(model, part, direction, features)
                    if ms > 0:
                        noisy_ms = float(ms * np.exp(noise * rng.standard_normal()))
                        rows.append(msgspec.structs.replace(row, ms_median=noisy_ms))
    return CostTable(
        identity=identity,
        versions={"torch": "2.15.0", "megatron-core": "0.19.2"},
        date="2026-01-31",
        threads=1,
        rows=tuple(rows),
    )


@dataclass(frozen=True)
class Times:
    """What a learner sees of a planned or a measured step."""

    times_2RPVM: np.ndarray
    scales: StageScales

    cut_M: tuple[bool, ...] = ()

    @property
    def own_2RPVM(self) -> np.ndarray:
        return self.times_2RPVM

    @property
    def cut_RM(self) -> np.ndarray:
        _, ranks, *_, positions = self.times_2RPVM.shape
        return np.tile(self.cut_M or (False,) * positions, (ranks, 1))
