# SPDX-License-Identifier: Apache-2.0
"""Memory of stages: weights as Megatron counts them, activations by hand, what a line says.

Shape legend: R data-parallel ranks, M micro-batches.
"""

from argparse import Namespace
from dataclasses import replace
from typing import Any

import pytest
import step_cases

from sparsebalance_megatron.cost.memory import (
    GIBIBYTE,
    MemoryModel,
    StageMemory,
    TokensHeld,
    memory_lines,
    stage_memory,
)
from sparsebalance_megatron.cost.table import ExpertShape
from sparsebalance_megatron.cost.work_model import work_model_named

SIZES = {"ffn_hidden_size": 160, "num_attention_heads": 8, "vocab_size": 1000}
SHAPE = replace(step_cases.SHAPE, **SIZES, tensor_parallel_size=2)


def model(**changes: Any) -> MemoryModel:
    values: dict[str, Any] = {
        "shape": SHAPE,
        "layers_per_stage": (3, 3),
        "virtual_stages": 1,
        "tied_embeddings": False,
        "sequence_parallel": True,
        "optimizer_ranks": 1,
        "selected_blocks_per_token": 0.0,
    }
    return MemoryModel(**(values | changes))


EXPERTS = ExpertShape(
    experts=16, top_k=4, ffn_hidden_size=96, shared_ffn_hidden_size=64, layers_share=0.5
)


@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("ranks", [1, 8])
def test_weights_of_one_stage_are_those_that_megatron_counts(
    experts: ExpertShape | None, gated: bool, tied: bool, ranks: int
) -> None:
    counting = pytest.importorskip("megatron.training.theoretical_memory_usage")
    shape = replace(SHAPE, gated_linear_unit=gated, experts=experts)
    expert_ranks = 4 if experts and ranks > 1 else 1
    args = Namespace(
        **vars(shape),
        moe_latent_size=None,
        moe_layer_freq=2,
        moe_ffn_hidden_size=experts and experts.ffn_hidden_size,
        moe_router_topk=experts and experts.top_k,
        moe_shared_expert_intermediate_size=experts and experts.shared_ffn_hidden_size,
        num_experts=experts and experts.experts,
        pipeline_model_parallel_size=1,
        expert_model_parallel_size=expert_ranks,
        mtp_num_layers=None,
        multi_latent_attention=False,
        normalization="RMSNorm",
        add_bias_linear=False,
        group_query_attention=True,
        kv_channels=shape.head_dim,
        num_layers=6,
        swiglu=gated,
        padded_vocab_size=shape.vocab_size,
        untie_embeddings_and_output_weights=not tied,
        tensor_model_parallel_size=shape.tensor_parallel_size,
        expert_tensor_parallel_size=shape.tensor_parallel_size,
        world_size=shape.tensor_parallel_size * ranks,
        data_parallel_size=ranks,
        use_distributed_optimizer=ranks > 1,
    )
    ours = model(
        shape=shape,
        layers_per_stage=(6,),
        tied_embeddings=tied,
        optimizer_ranks=ranks,
        expert_parallel_size=expert_ranks,
    ).weights_bytes(0)
    assert ours == pytest.approx(counting.compute_weight_and_optimizer_memory(args), rel=1e-12)


def test_stages_hold_the_layers_and_embeddings_that_are_theirs() -> None:
    layer = 64 * 16 * 2 * (8 + 2) / 2 + 64 * 160 * 3 / 2 + 2 * 64
    embedding = 64 * 1000 / 2
    shape = model(layers_per_stage=(2, 4, 3))
    assert [shape.parameters(stage) for stage in range(3)] == [
        *(2 * layer + embedding, 4 * layer, 3 * layer + embedding + 64)
    ]
    tied = model(layers_per_stage=(2, 4, 3), tied_embeddings=True)
    assert tied.parameters(2) == shape.parameters(2)  # two stages hold a copy each
    assert model(layers_per_stage=(9,), tied_embeddings=True).parameters(0) == (
        9 * layer + embedding + 64
    )


def test_a_layer_by_hand() -> None:
    """Per token: bfloat16 numbers and the log-sum-exp, of one of two tensor-parallel ranks."""
    norms = 4 * 64 / 2
    attention = (8 + 2 + 2) * 16 / 2 + 8 * 16 / 2
    mlp = 3 * 160 / 2
    plain = 2 * (norms + attention + mlp) + 4 * 8 / 2
    assert model().layer_bytes_per_token() == plain
    assert model(selected_blocks_per_token=10.0).layer_bytes_per_token() == plain + 4 * 10 / 2
    assert model(sequence_parallel=False).layer_bytes_per_token() == plain + 2 * norms
    assert model(recompute_all=True).layer_bytes_per_token() == 2 * 64 / 2
    kept = model(recompute_attention=True, selected_blocks_per_token=10.0)
    assert kept.layer_bytes_per_token() == plain - 4 * 8 / 2


def test_experts_hold_copies_of_their_tokens_and_what_they_compute() -> None:
    plain = model().layer_bytes_per_token()
    shape = replace(SHAPE, experts=EXPERTS)
    neurons = 3 * (64 + 4 * 96 - 160) / 2
    expected = plain + 0.5 * 2 * neurons + 0.5 * 2 * 4 * 64
    assert model(shape=shape).layer_bytes_per_token() == pytest.approx(expected)


def test_sharded_parameters_leave_each_rank_its_part() -> None:
    ranks = {"optimizer_ranks": 8, "expert_parallel_size": 2}
    whole = model(shape=replace(SHAPE, experts=EXPERTS), **ranks)
    parts = replace(whole, sharded_parameters=True)
    expected = 18 * (whole.parameters(0) / 8 + whole.expert_parameters(0) / 4)
    assert parts.weights_bytes(0) == pytest.approx(expected)


def test_tokens_in_flight_and_logits_count() -> None:
    held = TokensHeld(in_flight_P=(50.0, 48.0), largest=40.0)
    shape = model(selected_blocks_per_token=6.0)
    first, last = (stage_memory(shape, stage, held) for stage in (0, 1))
    per_token = shape.layer_bytes_per_token()
    assert first.activations_bytes == pytest.approx(50 * 3 * per_token)
    assert first.lists_bytes == pytest.approx(50 * 3 * 4 * 6 / 2)
    assert last.activations_bytes == pytest.approx(48 * 3 * per_token + 48 * 6 * 1000 / 2)
    assert first.total_bytes == first.weights_bytes + first.activations_bytes
    # Of several chunks the last runs backward at once.
    last = stage_memory(replace(shape, virtual_stages=2), 1, held)
    assert last.activations_bytes == pytest.approx(48 * 3 * per_token + 40 * 6 * 1000 / 2)


def test_recomputation_of_all_holds_one_whole_layer() -> None:
    held = TokensHeld(in_flight_P=(100.0,), largest=100.0)
    whole = model(layers_per_stage=(6,)).layer_bytes_per_token()
    memory = stage_memory(model(layers_per_stage=(6,), recompute_all=True), 0, held)
    expected = 100 * (6 * 2 * 64 / 2 + whole + 6 * 1000 / 2)
    assert memory.activations_bytes == pytest.approx(expected)


def test_segments_keep_keys_and_values_float32_sums_and_logits() -> None:
    held = TokensHeld(in_flight_P=(100.0, 60.0), largest=20.0, longest=80.0)
    keys_and_values = 2 * 2 * 16 / 2
    for recompute_all in (False, True):
        shape = model(recompute_all=recompute_all)
        for stage, (tokens, logits) in enumerate(((100.0, 0), (60.0, 6 * 1000 / 2))):
            memory = stage_memory(shape, stage, held)
            per_layer = tokens * shape.layer_bytes_per_token() + 4 * 80 * keys_and_values
            expected = 3 * per_layer + tokens * logits
            if recompute_all:
                expected += 3 * 2 * tokens * keys_and_values + 20 * model().layer_bytes_per_token()
            assert memory.activations_bytes == pytest.approx(expected)


@pytest.mark.parametrize(
    ("selection", "expected"),
    [
        ("token-kv-head", 2 * 32),
        ("token-query-head", 8 * 32),
        ("previous-block", 2 * 32 / 128),
        # A quarter of the budget in columns, each token with an entry.
        ("vertical-slash", 2 * (32 / 128 + 8)),
    ],
)
def test_entries_of_lists(selection: Any, expected: float) -> None:
    found = work_model_named(selection).list_entries_per_token(
        heads=8, groups=2, block_size=128, budget_blocks=32
    )
    assert found == expected


def test_stages_alike_are_said_once() -> None:
    alike = StageMemory(
        weights_bytes=2 * GIBIBYTE, activations_bytes=4 * GIBIBYTE, lists_bytes=GIBIBYTE / 4
    )
    stages = [replace(alike, weights_bytes=3 * GIBIBYTE), alike, alike]
    most = [replace(stage, activations_bytes=9 * GIBIBYTE) for stage in stages]
    lines = memory_lines(stages, most, "by hand")
    assert "by hand" in lines[0] and "not counted" in lines[0]
    assert lines[1:] == [
        "  stage 0: 7 = weights, gradients and optimizer 3 + activations 4 (of which lists of "
        "blocks 0.25) in these steps; at most 12, with every micro-batch at the token cap",
        "  stages 1-2: 6 = weights, gradients and optimizer 2 + activations 4 (of which lists of "
        "blocks 0.25) in these steps; at most 11, with every micro-batch at the token cap",
    ]
