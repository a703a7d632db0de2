# SPDX-License-Identifier: Apache-2.0
"""Costs are affine and monotone; recomputation, frozen weights, counted operations and block pairs
against counts."""

from dataclasses import replace

import numpy as np
import pytest
import step_cases
from cost.cost_cases import IDENTITY, PLANTED, predict_ms
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import cost as oracle

from sparsebalance_megatron.cost.model import (
    DEVICES,
    CostModel,
    Efficiency,
    attended_token_pairs,
    training_flops,
)
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import ExpertShape
from sparsebalance_megatron.cost.work_model import features, work_model_named
from sparsebalance_megatron.selector_registry import BUILT_IN

DOCUMENTS = st.lists(st.tuples(st.integers(1, 400), st.integers(1, 6)), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(documents=DOCUMENTS)
def test_prediction_equals_the_oracles_sum(documents: list[tuple[int, int]]) -> None:
    lengths, budgets = (list(column) for column in zip(*documents, strict=True))
    row = features(lengths, budgets, PLANTED.block_size, PLANTED.work)
    for part in (part for part in Part if part is not Part.EXPERTS):
        expected = oracle.micro_batch_ms(
            lengths, budgets, PLANTED.block_size, PLANTED.ms_per_unit[part, Direction.FORWARD]
        )
        assert predict_ms(PLANTED, part, Direction.FORWARD, row) == pytest.approx(
            expected, rel=1e-9
        )


def test_recompute_adds_the_forward_it_repeats() -> None:
    attention = {Part.ATTENTION, Part.DENSE_ATTENTION, Part.ROUTER}
    for full, attention_only, repeated in (
        (False, False, set()),
        (True, False, {*attention, Part.LINEAR, Part.EXPERTS}),
        (False, True, attention),
    ):
        model = PLANTED.with_recompute(full=full, attention_only=attention_only)
        for part in Part:
            forwards = (each.coefficients_ms(part, Direction.FORWARD) for each in (model, PLANTED))
            np.testing.assert_array_equal(*forwards)
            expected = PLANTED.coefficients_ms(part, Direction.BACKWARD)
            if part in repeated:
                expected = expected + PLANTED.coefficients_ms(part, Direction.FORWARD)
            np.testing.assert_array_equal(model.coefficients_ms(part, Direction.BACKWARD), expected)


def test_frozen_weights_leave_one_product_of_two() -> None:
    """Counted by hand: a projection's backward is as long as its forward, attention as before."""
    model = CostModel.analytic(IDENTITY.shape, 64)
    frozen = model.with_frozen_weights()
    changed = {(part, Direction.BACKWARD) for part in (Part.LINEAR, Part.HEAD, Part.EMBEDDING)}
    for timed in model.ms_per_unit.keys() - changed:
        assert frozen.ms_per_unit[timed] == model.ms_per_unit[timed]
    for part, direction in changed:
        forward = model.ms_per_unit[part, Direction.FORWARD]
        nothing = (0.0,) * len(forward)
        expected = nothing if part is Part.EMBEDDING else forward
        assert frozen.ms_per_unit[part, direction] == expected
    recomputed = frozen.with_recompute(full=True, attention_only=False)
    assert recomputed.ms_per_unit[Part.LINEAR, Direction.BACKWARD] == tuple(
        2 * value for value in model.ms_per_unit[Part.LINEAR, Direction.FORWARD]
    )


@pytest.mark.parametrize("ranks", [1, 2])
def test_counted_operations_of_a_layer(ranks: int) -> None:
    """2 operations per weight and token; 4 T^2 H D for dense attention over whole blocks; divided
    by the tensor-parallel ranks."""
    shape = replace(IDENTITY.shape, tensor_parallel_size=ranks)
    efficiency = Efficiency(dense=0.7, sparse=0.3, linear=0.5, experts=0.4)
    model = CostModel.analytic(shape, 128, efficiency=efficiency)
    peak = ranks * DEVICES["h200"].flops_per_ms
    linear, sparse, dense = 0.5 * peak, 0.3 * peak, 0.7 * peak
    row = features([1024], np.inf, 128, model.work)
    weights = 256 * (8 + 2 + 2) * 32 + 8 * 32 * 256 + 3 * 256 * 688
    for part, flops in ((Part.LINEAR, 2 * 1024 * weights), (Part.HEAD, 2 * 1024 * 256 * 1024)):
        predicted = predict_ms(model, part, Direction.FORWARD, row)
        assert predicted == pytest.approx(flops / linear)
    causal_pairs = 8 * 9 / 2 * 128**2
    for part, rate in ((Part.ATTENTION, sparse), (Part.DENSE_ATTENTION, dense)):
        attention = predict_ms(model, part, Direction.FORWARD, row)
        assert attention == pytest.approx(4 * causal_pairs * 8 * 32 / rate)
        assert predict_ms(model, part, Direction.BACKWARD, row) == pytest.approx(2.5 * attention)
    for direction in Direction:
        assert predict_ms(model, Part.EXPERTS, direction, row) == 0.0
    # Means of blocks, and scores of 8 heads and 128 queries for each of 36 pairs of blocks.
    router = 1024 * (8 + 2) * 32 + 2 * 36 * 8 * 128 * 32
    assert predict_ms(model, Part.ROUTER, Direction.FORWARD, row) == pytest.approx(router / sparse)
    assert predict_ms(model, Part.ROUTER, Direction.BACKWARD, row) == 0.0


def test_routed_experts_are_a_part_of_their_own() -> None:
    """2 operations per weight of a token's experts, and its copies there and back."""
    experts = ExpertShape(
        experts=16, top_k=4, ffn_hidden_size=96, shared_ffn_hidden_size=64, layers_share=0.75
    )
    shape = replace(IDENTITY.shape, experts=experts)
    model = CostModel.analytic(
        shape, 128, expert_parallel_size=8, gigabytes_per_second=100.0, device="h100"
    )
    row, peak = features([1024], np.inf, 128, model.work), DEVICES["h100"].flops_per_ms
    products = 1024 * 0.75 * 2 * 4 * 3 * 256 * 96 / (0.4 * peak)
    sent = 1024 * 0.75 * 2 * (4 * 256 * 2 * 7 / 8) / 1e8
    assert predict_ms(model, Part.EXPERTS, Direction.FORWARD, row) == pytest.approx(products + sent)
    backward = predict_ms(model, Part.EXPERTS, Direction.BACKWARD, row)
    assert backward == pytest.approx(2 * products + sent)
    beside = 0.25 * 3 * 256 * 688 + 0.75 * (3 * 256 * 64 + 256 * 16)
    weights = 256 * (8 + 2 + 2) * 32 + 8 * 32 * 256 + beside
    linear = predict_ms(model, Part.LINEAR, Direction.FORWARD, row)
    assert linear == pytest.approx(1024 * 2 * weights / (0.5 * peak))
    alone = CostModel.analytic(shape, 128, device="h100")
    assert predict_ms(alone, Part.EXPERTS, Direction.FORWARD, row) == pytest.approx(products)
    recomputed = model.with_recompute(full=True, attention_only=False)
    again = predict_ms(recomputed, Part.EXPERTS, Direction.BACKWARD, row)
    assert again == pytest.approx(3 * products + 2 * sent)


SMALL = {"hidden_size": 24, "ffn_hidden_size": 40, "num_attention_heads": 6, "head_dim": 5}
SHAPE = replace(step_cases.SHAPE, **SMALL, vocab_size=77)


@given(st.integers(0, 70), st.integers(1, 12), st.sampled_from([1, 2, 8, 16]))
def test_pairs_are_those_of_a_loop_over_queries(tokens: int, budget: int, block_size: int) -> None:
    expected = oracle.attended_token_pairs(tokens, budget, block_size)
    assert attended_token_pairs(tokens, budget, block_size) == expected


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
            # Scores of six heads, and the sum of values weighted by them.
            pairs = oracle.attended_token_pairs(length, int(budget), block_size)
            forward += 6 * 2 * (2 * 5 * pairs)
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


BLOCK_SIZES = st.sampled_from([1, 2, 8, 16])
WORK = work_model_named("previous-block")


@settings(max_examples=150)
@given(tokens=st.integers(1, 90), block_size=BLOCK_SIZES, data=st.data())
def test_growth_is_that_of_the_counted_pairs(tokens: int, block_size: int, data) -> None:
    """From one budget to another, both up to the document's blocks; the rest does not move."""
    budgets = st.integers(1, -(-tokens // block_size))
    low, high = data.draw(budgets), data.draw(budgets)
    per_block, less = WORK.growth(np.array([low, high]))
    predicted = np.diff(per_block) * tokens / block_size - np.diff(less)
    counted = [oracle.attended_block_pairs(tokens, k, block_size) for k in (low, high)]
    assert predicted == pytest.approx(np.diff(counted), abs=1e-9)


def test_the_router_scores_what_selects() -> None:
    sizes = {name: work_model_named(name).scores_per_visible_pair(8, 2, 64) for name in BUILT_IN}
    # 16 probes of a block with 8 heads and 64 keys.
    by_token = {"token-kv-head": 128, "token-query-head": 512}
    assert sizes == {"vertical-slash": 8192, "previous-block": 2, **by_token}
