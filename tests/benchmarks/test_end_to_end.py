# SPDX-License-Identifier: Apache-2.0
"""The end-to-end benchmark: who runs when, and what is computed from times."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from statistics import median

import numpy as np
import pytest
import torch
from end_to_end.evaluation import compare
from end_to_end.results import balanced_ms
from end_to_end.variants import StepOrder
from hypothesis import given
from hypothesis import strategies as st
from older_releases import needs_grouped_flash

TIMES = st.lists(st.floats(0.5, 100.0), min_size=4, max_size=4)


@pytest.mark.parametrize("variants", [1, 2, 5])
def test_every_variant_runs_in_every_place_and_after_every_other_equally_often(
    variants: int,
) -> None:
    rounds = 1 + variants % 2
    order = StepOrder(variants, rounds * variants)
    rows = [
        [order.variant(step) for step in range(order.steps) if order.batch(step) == batch]
        for batch in range(order.batches)
    ]
    assert all(sorted(row) == list(range(variants)) for row in rows)
    places = Counter((place, variant) for row in rows for place, variant in enumerate(row))
    assert set(places.values()) == {rounds}
    neighbours = Counter(pair for row in rows for pair in pairwise(row))
    assert len(neighbours) == variants * (variants - 1)
    assert set(neighbours.values()) <= {rounds}


@given(TIMES, TIMES, st.floats(0.0, 50.0))
def test_without_a_pipeline_balance_saves_what_the_slowest_rank_has_beyond_the_mean(
    forward: list[float], backward: list[float], rest_ms: float
) -> None:
    times = [np.array(values).reshape(2, 1, 1, 2) for values in (forward, backward)]
    busy_D = sum(times).sum(axis=(1, 2, 3))
    step_ms = busy_D.max() + rest_ms
    assert balanced_ms(step_ms, *times) == pytest.approx(step_ms - busy_D.max() + busy_D.mean())


def test_one_long_micro_batch_of_a_pipeline_costs_time() -> None:
    forward = np.array([[1.0, 1.0, 6.0, 1.0], [1.0, 1.0, 6.0, 1.0]]).reshape(1, 2, 1, 4)
    # By hand, backward as long as forward: stage 0 ends the last backward after 29 ms; with four
    # micro-batches of 2.25 ms each way it would after five times 4.5 ms.
    assert balanced_ms(40.0, forward, forward) == pytest.approx(40.0 - 29.0 + 22.5)


@given(st.lists(st.tuples(st.floats(1.0, 100.0), st.floats(1.0, 100.0)), min_size=1, max_size=12))
def test_paired_comparison(times_ms: list[tuple[float, float]]) -> None:
    reference_ms, variant_ms = np.array(times_ms).T
    found = compare(reference_ms, variant_ms, seed=1)
    ratios = [first / second for first, second in times_ms]
    assert found["speedup"] == pytest.approx(sum(reference_ms) / sum(variant_ms))
    assert found["median_ratio"] == pytest.approx(median(ratios))
    low, high = found["interval"]
    assert min(ratios) * (1 - 1e-9) <= low <= high <= max(ratios) * (1 + 1e-9)


@needs_grouped_flash
def test_dense_peer_is_causal_attention_of_every_document() -> None:
    from end_to_end.attention import dense_attention

    generator = torch.Generator().manual_seed(0)
    shapes = [(9, 4, 8), (9, 2, 8), (9, 2, 8)]
    qkv = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    leaves = [x.requires_grad_() for x in qkv]
    q, k, v = leaves
    expected = []
    for token in range(9):
        first = 0 if token < 6 else 6
        for head in range(4):
            keys, values = (x[first : token + 1, head // 2] for x in (k, v))
            weights = torch.softmax(keys @ q[token, head] * 0.3, dim=0)
            expected.append(weights @ values)
    expected_TD = torch.stack(expected).view(9, 32)
    found_TD = dense_attention(q, k, v, (0, 6, 9), 0.3)
    torch.testing.assert_close(found_TD, expected_TD)
    gradient = torch.randn(9, 32, generator=generator, dtype=torch.float64)
    for gradients in zip(
        *(torch.autograd.grad(out, leaves, gradient) for out in (found_TD, expected_TD)),
        strict=True,
    ):
        torch.testing.assert_close(*gradients)
