# SPDX-License-Identifier: Apache-2.0
"""Counted operations against counts by loops over tokens."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import step_cases
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.cost.model import attended_token_pairs, training_flops

SMALL = {"hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 6, "head_dim": 5}
SHAPE = replace(step_cases.SHAPE, **SMALL, vocab_size=77)


def naive_pairs(tokens: int, budget: int, block_size: int) -> int:
    """Every query reads its own block up to itself, and whole blocks before it."""
    pairs = 0
    for query in range(tokens):
        block = query // block_size
        pairs += query % block_size + 1
        pairs += min(budget - 1, block) * block_size
    return pairs


@given(st.integers(0, 70), st.integers(1, 12), st.sampled_from([1, 2, 8, 16]))
def test_pairs_are_those_of_a_loop_over_queries(tokens: int, budget: int, block_size: int) -> None:
    assert attended_token_pairs(tokens, budget, block_size) == naive_pairs(
        tokens, budget, block_size
    )


@pytest.mark.parametrize("gated", [True, False])
def test_flops_of_a_small_model_counted_matrix_by_matrix(gated: bool) -> None:
    shape = replace(SHAPE, gated_linear_unit=gated)
    lengths, layers, block_size = [5, 33, 64], 2, 8
    budgets_LS = np.array([[1, 3, 2], [4, 1, 8]])
    forward = 0
    for layer in range(layers):
        for length, budget in zip(lengths, budgets_LS[layer], strict=True):
            for rows, columns in (
                *((24, 6 * 5), (24, 2 * 5), (24, 2 * 5), (6 * 5, 24)),
                *((24, 40), (40, 24), *([(24, 40)] if gated else [])),
            ):
                forward += 2 * length * rows * columns
            for _head in range(6):
                # Scores, and the sum of values weighted by them.
                forward += 2 * (2 * 5 * naive_pairs(length, int(budget), block_size))
    forward += sum(2 * length * 24 * 77 for length in lengths)
    counted = training_flops(
        shape, layers=2, lengths_tokens_S=lengths, budgets_LS=budgets_LS, block_size=block_size
    )
    assert counted == 3 * forward


def test_dense_flops_are_those_of_the_largest_budgets_on_any_tensor_parallel_size() -> None:
    lengths = [7, 100, 1000]
    all_blocks = np.full((4, 3), 1000)
    dense = training_flops(
        SHAPE, layers=4, lengths_tokens_S=lengths, budgets_LS=None, block_size=16
    )
    split = replace(SHAPE, tensor_parallel_size=2)
    assert dense == training_flops(
        split, layers=4, lengths_tokens_S=lengths, budgets_LS=all_blocks, block_size=16
    )
