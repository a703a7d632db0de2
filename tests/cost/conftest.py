# SPDX-License-Identifier: Apache-2.0
"""Cost tables with known contents."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from cost.cost_cases import measured
from step_cases import SHAPE

from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Part
from sparsebalance_megatron.cost.table import CostTable, RunIdentity

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
        shape=replace(
            SHAPE,
            hidden_size=256,
            ffn_hidden_size=688,
            num_attention_heads=8,
            head_dim=32,
            vocab_size=1024,
        ),
    )


@pytest.fixture
def planted() -> CostModel:
    """Coefficients of a plausible model; the router has no backward."""
    per_row = (0.05, 0.002, 1e-3, 0.0, 0.0)
    forward_ms = {
        Part.ATTENTION: (0.1, 0.01, 1e-4, 0.03, 0.0),
        Part.DENSE_ATTENTION: (0.1, 0.01, 1e-4, 0.0, 0.02),
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
    return lambda noise=0.0: measured(planted, identity, MIXES, budgets=BUDGETS, noise=noise)
