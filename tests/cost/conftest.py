# SPDX-License-Identifier: Apache-2.0
"""Cost tables with known contents."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cost.cost_cases import predict_ms

from sparsebalance_megatron.cost.model import CostModel, Direction, Part
from sparsebalance_megatron.cost.table import CostRow, CostTable, ModelShape, RunIdentity

BLOCK_SIZE = 128
MIXES = ([256], [1000], [4096], [8192, 300], [128] * 16, [77] * 9, [16384], [2048, 4096, 513])
BUDGETS = (1, 4, 16, None)


@pytest.fixture
def identity() -> RunIdentity:
    return RunIdentity(
        device="cpu",
        dtype="float32",
        block_size=BLOCK_SIZE,
        selection="previous-block",
        shape=ModelShape(
            hidden_size=256,
            ffn_hidden_size=688,
            num_attention_heads=8,
            num_query_groups=2,
            head_dim=32,
            vocab_size=1024,
            gated_linear_unit=True,
            tensor_parallel_size=1,
        ),
    )


@pytest.fixture
def planted() -> CostModel:
    """Coefficients of a plausible model; the router has no backward."""
    per_row = (0.05, 0.002, 1e-3, 0.0, 0.0)
    forward_ms = {
        Part.ATTENTION: (0.1, 0.01, 1e-4, 0.03, 0.0),
        Part.ROUTER: (0.02, 0.003, 2e-5, 0.0, 1e-4),
        Part.LINEAR: per_row,
        Part.EMBEDDING: (0.01, 0.0, 1e-5, 0.0, 0.0),
        Part.HEAD: (0.3, 0.0, 4e-3, 0.0, 0.0),
    }
    backward_ms = {part: tuple(2 * ms for ms in row) for part, row in forward_ms.items()}
    backward_ms[Part.ROUTER] = (0.0,) * 5
    return CostModel(
        block_size=BLOCK_SIZE, forward_ms=forward_ms, backward_ms=backward_ms, source="planted"
    )


@pytest.fixture
def measure(identity: RunIdentity, planted: CostModel) -> Callable[..., CostTable]:
    """``measure(noise)``: a table of what ``planted`` takes, times log-normal noise."""

    def build(noise: float = 0.0) -> CostTable:
        rng = np.random.default_rng(0)
        rows = []
        for direction in Direction:
            for part in Part:
                if part is Part.ROUTER and direction is Direction.BACKWARD:
                    continue
                for lengths in MIXES:
                    for budget in BUDGETS if part is Part.ATTENTION else (None,):
                        row = CostRow(
                            part=part,
                            direction=direction,
                            lengths_tokens=tuple(lengths),
                            budget_blocks=budget,
                            ms_median=1.0,
                            ms_spread=0.01,
                            repeats=5,
                        )
                        ms = predict_ms(
                            planted, part, direction, row.features(BLOCK_SIZE, planted.work)
                        )
                        noisy_ms = float(ms * np.exp(noise * rng.standard_normal()))
                        rows.append(CostRow(**(vars(row) | {"ms_median": noisy_ms})))
        return CostTable(
            identity=identity,
            versions={"torch": "2.15.0", "megatron-core": "0.19.2"},
            date="2026-01-31",
            threads=1,
            rows=tuple(rows),
        )

    return build
