# SPDX-License-Identifier: Apache-2.0
"""Costs are affine and monotone; recomputation, frozen weights and counted operations by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost.cost_cases import predict_ms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from oracles import cost as oracle

from sparsebalance_megatron.cost.model import PEAK_FLOPS_PER_MS, CostModel
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import RunIdentity
from sparsebalance_megatron.cost.work_model import features, work_model_named

DOCUMENTS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 6)), min_size=1, max_size=4)
same_planted_model = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@same_planted_model
@given(documents=DOCUMENTS)
def test_prediction_equals_the_oracles_sum(
    planted: CostModel, documents: list[tuple[int, int]]
) -> None:
    lengths, budgets = (list(column) for column in zip(*documents, strict=True))
    row = features(lengths, budgets, planted.block_size, planted.work)
    for part in Part:
        expected = oracle.micro_batch_ms(
            lengths, budgets, planted.block_size, planted.forward_ms[part]
        )
        assert predict_ms(planted, part, Direction.FORWARD, row) == pytest.approx(
            expected, rel=1e-9
        )


def test_recompute_adds_the_forward_it_repeats(planted: CostModel) -> None:
    attention = {Part.ATTENTION, Part.DENSE_ATTENTION, Part.ROUTER}
    for full, attention_only, attention_kept, repeated in (
        (False, False, False, set()),
        (True, False, False, {*attention, Part.LINEAR}),
        (False, True, False, attention),
        (False, False, True, set()),
        (True, False, True, {Part.LINEAR}),
        (False, True, True, set()),
    ):
        model = planted.with_recompute(
            full=full, attention_only=attention_only, attention_kept=attention_kept
        )
        assert model.forward_ms == planted.forward_ms
        for part in Part:
            expected = planted.coefficients_ms(part, Direction.BACKWARD)
            if part in repeated:
                expected = expected + planted.coefficients_ms(part, Direction.FORWARD)
            np.testing.assert_array_equal(model.coefficients_ms(part, Direction.BACKWARD), expected)


def test_frozen_weights_leave_one_product_of_two(identity: RunIdentity) -> None:
    """Counted by hand: a projection's backward is as long as its forward, attention as before."""
    model = CostModel.analytic(identity.shape, 64)
    frozen = model.with_frozen_weights()
    assert frozen.forward_ms == model.forward_ms
    for part in (Part.LINEAR, Part.HEAD):
        assert frozen.backward_ms[part] == model.forward_ms[part]
    assert not any(frozen.backward_ms[Part.EMBEDDING])
    for part in (Part.ATTENTION, Part.ROUTER):
        assert frozen.backward_ms[part] == model.backward_ms[part]
    recomputed = frozen.with_recompute(full=True, attention_only=False)
    assert recomputed.backward_ms[Part.LINEAR] == tuple(
        2 * value for value in model.forward_ms[Part.LINEAR]
    )


def test_counted_operations_of_a_layer(identity: RunIdentity) -> None:
    """2 operations per weight and token; 4 T^2 H D for dense attention over whole blocks."""
    shape = identity.shape
    model = CostModel.analytic(shape, 128)
    linear, attention_rate = 0.5 * PEAK_FLOPS_PER_MS["h200"], 0.3 * PEAK_FLOPS_PER_MS["h200"]
    row = features([1024], np.inf, 128, model.work)
    weights = 256 * (8 + 2 + 2) * 32 + 8 * 32 * 256 + 3 * 256 * 688
    for part, flops in ((Part.LINEAR, 2 * 1024 * weights), (Part.HEAD, 2 * 1024 * 256 * 1024)):
        predicted = predict_ms(model, part, Direction.FORWARD, row)
        assert predicted == pytest.approx(flops / linear)
    causal_pairs = 8 * 9 / 2 * 128**2
    attention = predict_ms(model, Part.ATTENTION, Direction.FORWARD, row)
    assert attention == pytest.approx(4 * causal_pairs * 8 * 32 / attention_rate)
    for part in (Part.ATTENTION, Part.DENSE_ATTENTION):
        assert predict_ms(model, part, Direction.BACKWARD, row) == pytest.approx(2.5 * attention)
    assert predict_ms(model, Part.ROUTER, Direction.BACKWARD, row) == 0.0


def test_counted_operations_shrink_with_tensor_parallelism(identity: RunIdentity) -> None:
    row = features([4096], 4, 128, work_model_named("previous-block"))
    whole = CostModel.analytic(identity.shape, 128)
    half = CostModel.analytic(replace(identity.shape, tensor_parallel_size=2), 128)
    for part in (Part.ATTENTION, Part.ROUTER, Part.LINEAR, Part.HEAD):
        for direction in Direction:
            assert predict_ms(half, part, direction, row) == pytest.approx(
                predict_ms(whole, part, direction, row) / 2
            )
