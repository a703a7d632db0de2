# SPDX-License-Identifier: Apache-2.0
"""Public sizes, counted costs, and the coverage prior."""

from __future__ import annotations

import numpy as np
import pytest

from sparsebalance_megatron.cost.model import Direction, Part
from sparsebalance_megatron.view.simulate.lengths import WorkloadError
from sparsebalance_megatron.view.simulate.models import (
    H200_PEAK_FLOPS_PER_MS,
    cost_of,
    h200_cost,
    prior_coverage,
)


def test_qwen25_3b_layer_counted_by_hand():
    """Per token 2 x (q, k, v, o, three MLP matrices); per block pair 4 x heads x head_dim x B^2."""
    cost = h200_cost("qwen2.5-3b", block_size=256)
    linear_flops = 2 * (2048 * 2048 * 2 + 2 * 2048 * 256 + 3 * 2048 * 11008)
    pair_flops = 4 * 16 * 128 * 256**2
    linear = cost.coefficients_ms(Part.LINEAR, Direction.FORWARD)
    attention = cost.coefficients_ms(Part.ATTENTION, Direction.FORWARD)
    assert linear[2] == pytest.approx(linear_flops / (0.5 * H200_PEAK_FLOPS_PER_MS))
    assert attention[3] == pytest.approx(pair_flops / (0.3 * H200_PEAK_FLOPS_PER_MS))
    head = cost.coefficients_ms(Part.HEAD, Direction.BACKWARD)
    assert head[2] == pytest.approx(2 * 2 * 2048 * 151936 / (0.5 * H200_PEAK_FLOPS_PER_MS))


def test_tensor_parallel_ranks_share_the_work():
    one, two = (h200_cost("qwen2.5-0.5b", block_size=256, tensor_parallel_size=tp) for tp in (1, 2))
    for part in (Part.LINEAR, Part.ATTENTION, Part.HEAD):
        ratio = one.coefficients_ms(part, Direction.FORWARD).sum()
        assert ratio == pytest.approx(2 * two.coefficients_ms(part, Direction.FORWARD).sum())


def test_layers_are_needed_with_a_table(tmp_path):
    arguments = {"block_size": 256, "tensor_parallel_size": 1}
    _, layers = cost_of("qwen2.5-3b", cost_table=None, layers=None, **arguments)
    assert layers == 36
    with pytest.raises(WorkloadError, match="add --layers"):
        cost_of("qwen2.5-3b", cost_table=tmp_path / "t.json", layers=None, **arguments)
    with pytest.raises(WorkloadError, match="--layers 0"):
        cost_of("qwen2.5-3b", cost_table=None, layers=0, **arguments)


def test_prior_is_a_power_of_the_share_of_blocks():
    curves = prior_coverage(3, 256)
    assert curves.observed_LU.all()
    for blocks in (3, 40, 181):
        middle = 2 ** (np.floor(np.log2(blocks)) + 0.5)
        for budget in (1, 2):
            expected = min(budget / middle, 1.0) ** 0.35
            assert curves.coverage(2, blocks, budget) == pytest.approx(expected)
        assert curves.coverage(0, blocks, blocks) == 1.0
