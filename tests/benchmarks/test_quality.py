# SPDX-License-Identifier: Apache-2.0
"""The quality benchmark: the attention that scores models, and the statistics of its tables."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from quality.intervals import difference, interval
from quality.masked_attention import masked_attention

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.selector_registry import BUILT_IN


@pytest.mark.parametrize("selection", BUILT_IN)
def test_masked_attention_is_that_of_the_kernels(selection: Any) -> None:
    """To rounding: documents of 1 token, of whole blocks and of ragged ones."""
    generator = torch.Generator().manual_seed(0)
    layout = packed_layout((0, 1, 17, 48), 8, "cpu")
    q_THD, k_TGD, v_TGD = (
        torch.randn(48, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2)
    )
    selector = selector_named(selection)
    ranking = rank_sequence(
        selector, q_THD, k_TGD, layout, softmax_scale=0.3, max_budget=3, observe=False
    )
    lists = selector.select(ranking, torch.tensor([1, 2, 3]))
    found, _ = masked_attention(q_THD, k_TGD, v_TGD, lists, softmax_scale=0.3)
    expected, _ = block_sparse_attention(
        *(q_THD, k_TGD, v_TGD), lists, softmax_scale=0.3, implementation="reference"
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_intervals_are_those_of_student() -> None:
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_differences_are_paired_by_seed() -> None:
    arm = {"seeds": [0, 2, 3], "loss": [1.0, 5.0, None]}
    reference = {"seeds": [2, 0, 1], "loss": [4.0, 0.5, 9.0]}
    found = difference(arm, reference, "loss")
    assert found is not None and (found.mean, found.count) == (0.75, 2)
    assert difference(arm, {"seeds": [7], "loss": [1.0]}, "loss") is None
