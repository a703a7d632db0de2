# SPDX-License-Identifier: Apache-2.0
"""What a run reads of Megatron's config and arguments, and what a checkpoint decides."""

from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.cost.table import ExpertShape
from sparsebalance_megatron.megatron import training_arguments
from sparsebalance_megatron.megatron.sequence_groups import check_lockstep_ranks
from sparsebalance_megatron.megatron.settings import (
    expert_group_ranks,
    expert_shape,
    micro_batch_group_size,
    token_multiple,
    warm_up_samples,
)
from sparsebalance_megatron.megatron.training_arguments import (
    changed_attention,
    settle_attention,
)


@pytest.mark.parametrize(
    ("stages", "virtual", "given_size", "expected"),
    [(2, 2, 4, 4), (2, 2, 2, None), (2, 2, None, None), (2, None, 4, None)],
)
def test_only_groups_of_virtual_stages_that_differ_from_the_pipeline_are_named(
    stages: int, virtual: int | None, given_size: int | None, expected: int | None
) -> None:
    transformer_config = SimpleNamespace(
        pipeline_model_parallel_size=stages,
        virtual_pipeline_model_parallel_size=virtual,
        microbatch_group_size_per_vp_stage=given_size,
    )
    assert micro_batch_group_size(transformer_config) == expected


@pytest.mark.parametrize(
    ("experts", "expert_parallel", "expert_tensor", "tensor", "ranks"),
    [
        (None, 1, None, 2, 1),
        (8, 1, None, 1, 1),
        (8, 8, None, 1, 8),
        (8, 2, None, 4, 2),
        (8, 2, 1, 2, 1),
        (8, 4, 1, 2, 2),
        (8, 2, 1, 4, 1),
        (8, 1, 2, 1, 2),
        (6, 6, 1, 4, 3),
    ],
)
def test_an_expert_group_is_neighbouring_data_parallel_ranks(
    experts: int | None, expert_parallel: int, expert_tensor: int | None, tensor: int, ranks: int
) -> None:
    """In the last case groups are ranks 0 to 5 and 6 to 11, while ranks 4 to 7 are tensor-parallel:
    3 data-parallel ranks hang together."""
    transformer_config = SimpleNamespace(
        num_moe_experts=experts,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=expert_tensor,
        tensor_model_parallel_size=tensor,
    )
    assert expert_group_ranks(transformer_config) == ranks


EXPERTS = {
    **{"num_layers": 4, "ffn_hidden_size": 256, "moe_ffn_hidden_size": 64},
    **{"moe_router_topk": 2, "moe_shared_expert_intermediate_size": None},
    **{"num_moe_experts": 8, "moe_layer_freq": 1},
}


def test_experts_are_those_of_the_layers_that_have_them() -> None:
    shape = ExpertShape(experts=8, top_k=2, ffn_hidden_size=64)
    assert expert_shape(SimpleNamespace(**EXPERTS)) == shape
    for pattern, share in ((2, 0.5), (3, 0.5), ([0, 1, 1, 1], 0.75)):
        some = SimpleNamespace(**EXPERTS | {"moe_layer_freq": pattern})
        assert expert_shape(some) == replace(shape, layers_share=share)
    shared = {"moe_shared_expert_intermediate_size": 96, "moe_ffn_hidden_size": None}
    found = expert_shape(SimpleNamespace(**EXPERTS | shared))
    assert found == replace(shape, ffn_hidden_size=256, shared_ffn_hidden_size=96)
    assert expert_shape(SimpleNamespace(num_moe_experts=None)) is None
    assert expert_shape(SimpleNamespace(**EXPERTS | {"moe_layer_freq": [0] * 4})) is None


@pytest.mark.parametrize(
    ("differs", "complaint"),
    [
        *(({"moe_layer_freq": each}, "--moe-layer-freq") for each in (0, -1, [1], [0, 1, 2, 1])),
        ({"moe_router_topk": 9}, "--moe-router-topk 9: .* at most --num-experts 8"),
    ],
)
def test_experts_that_cannot_be_are_refused(differs: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        expert_shape(SimpleNamespace(**EXPERTS | differs))


def config(**fields: Any) -> SimpleNamespace:
    """What Megatron's rule reads of a ``TransformerConfig``."""
    plain = {"fp8": None, "fp8_recipe": "delayed", "fp4": None, "fp4_recipe": "nvfp4"}
    plain |= {"use_transformer_engine_op_fuser": False}
    return SimpleNamespace(
        **plain | {"tensor_model_parallel_size": 1, "sequence_parallel": False} | fields
    )


@pytest.mark.parametrize(
    ("fields", "multiple"),
    [
        ({}, 1),
        ({"use_transformer_engine_op_fuser": True}, 1),
        ({"fp8": "hybrid"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "tensorwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, 16),
        ({"fp8": "e4m3", "fp8_recipe": "mxfp8"}, 32),
        ({"fp4": "e2m1"}, 128),
        ({"tensor_model_parallel_size": 2}, 1),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
        (
            {
                **{"tensor_model_parallel_size": 2, "sequence_parallel": True},
                **{"fp8": "e4m3", "fp8_recipe": "mxfp8"},
            },
            64,
        ),
    ],
)
def test_the_multiple_is_megatrons_in_every_sequence_parallel_part(
    fields: dict[str, Any], multiple: int
) -> None:
    assert token_multiple(config(**fields)) == multiple


def _arguments(dense_up_to: str | None, **others: Any) -> Namespace:
    """Of a run; None is one before there was the flag."""
    values = {"block_size": 256, "base_budget": 32, "selection": "previous-block"} | others
    values = dict.fromkeys(("sensitivity", "layer_budgets", "cost_table")) | values
    values |= {"first_blocks": 1}
    if dense_up_to is not None:
        values["dense_up_to"] = dense_up_to
    names = {f"sparse_balance_{name}": value for name, value in values.items()}
    return Namespace(sparse_balance=True, finetune=False, **names)


def _open(**others: Any) -> Namespace:
    """Of a run that is not given the length."""
    return Namespace(**vars(_arguments(None, **others)), sparse_balance_dense_up_to=None)


@pytest.mark.parametrize(
    ("now", "trained", "found"),
    [
        pytest.param(_open(), _arguments("4096"), "4096", id="kept"),
        pytest.param(_arguments("auto"), _arguments("4096"), "auto", id="auto-is-given"),
        pytest.param(
            _open(selection="token-kv-head"), _arguments("4096"), "auto", id="another-selection"
        ),
        pytest.param(_arguments("0"), _arguments("4096"), "0", id="the-flag-wins"),
        pytest.param(_open(), _arguments("4096", dense_up_to_counted=True), "4096", id="counted"),
        pytest.param(_open(), None, "auto", id="no-checkpoint"),
        pytest.param(_open(), Namespace(), "auto", id="without-the-plugin"),
        pytest.param(_open(), _arguments(None), "0", id="before-there-was-a-flag"),
        pytest.param(_open(base_budget=8), _arguments("4096"), "auto", id="another-budget"),
        pytest.param(_open(), _arguments("4096", layer_budgets="dense:all"), "auto", id="exact"),
    ],
)
def test_a_checkpoint_keeps_the_length_up_to_which_documents_are_dense(
    now: Namespace, trained: Namespace | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_arguments, "arguments_of_weights", lambda args: trained)
    now, is_open = Namespace(**vars(now)), now.sparse_balance_dense_up_to is None
    lines = settle_attention(now)
    assert now.sparse_balance_dense_up_to == found
    assert len(lines) == (is_open and found != "auto")


@pytest.mark.parametrize(
    ("trained", "finetune", "kept"),
    [
        pytest.param({"layer_budgets": "3:0 14:1"}, False, "3:0 14:1", id="resumed"),
        pytest.param({"layer_budgets": "3:0 14:1"}, True, None, id="finetuned"),
        pytest.param({"layer_budgets": "3:0 14:1", "block_size": 64}, False, None, id="blocks"),
        pytest.param({"layer_budgets": None}, False, None, id="without"),
    ],
)
def test_a_checkpoint_keeps_base_budgets_by_sensitivity(
    trained: dict[str, Any], finetune: bool, kept: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _arguments("4096", **trained)
    monkeypatch.setattr(training_arguments, "arguments_of_weights", lambda args: before)
    now = _arguments("4096", sensitivity="sensitivity.json", layer_budgets=None)
    now.finetune = finetune
    lines = settle_attention(now)
    assert now.sparse_balance_layer_budgets == kept
    assert (now.sparse_balance_sensitivity is None) == (kept is not None) == bool(lines)


def test_a_counted_length_of_a_checkpoint_gives_way_to_a_cost_table(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for counted, found in ((True, "auto"), (False, "4096")):
        trained = _arguments("4096", dense_up_to_counted=counted, layer_budgets="3:0 14:1")
        monkeypatch.setattr(training_arguments, "arguments_of_weights", lambda _, was=trained: was)
        given = {"sensitivity": "sensitivity.json", "layer_budgets": None}
        now = _open(cost_table="table.json", **given)
        line, _ = settle_attention(now)
        assert now.sparse_balance_dense_up_to == found
        assert now.sparse_balance_layer_budgets == "3:0 14:1"
        assert ("4096 was counted" in line) == counted


def test_weights_of_another_length_are_named() -> None:
    (line,) = changed_attention(_arguments("4096"), _arguments("0"))
    assert line == "--sparse-balance-dense-up-to is 0; these weights were trained with 4096"
    assert changed_attention(_arguments(None), _arguments("0")) == []
    (line,) = changed_attention(_arguments(None), _arguments("4096"))
    assert line == "--sparse-balance-dense-up-to is 4096; these weights were trained with 0"
    lines = changed_attention(
        _arguments("0", layer_budgets="dense:all"), _arguments("0", base_budget=8)
    )
    assert lines == [
        "--sparse-balance-base-budget is 8; these weights were trained with 32",
        "--sparse-balance-layer-budgets is absent; these weights were trained with dense:all",
    ]


@pytest.mark.parametrize(
    ("experts", "lockstep_ranks", "fits"),
    [
        ([0, 1], 2, True),
        ([2, 3], 2, True),
        ([0, 2], 2, False),
        ([1, 2], 2, False),
        ([0, 2], 4, True),
        ([0], 1, True),
        ([0, 1], 1, False),
    ],
)
def test_an_expert_group_must_be_neighbouring_ranks(
    experts: list[int], lockstep_ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """World rank 2 d + t is tensor-parallel rank t of data-parallel rank d of four."""

    def expert_group() -> list[int]:
        return [2 * place + tensor for place in experts for tensor in (0, 1)]

    monkeypatch.setattr(parallel_state, "get_expert_tensor_and_model_parallel_group", expert_group)
    monkeypatch.setattr(
        parallel_state,
        "get_data_parallel_group",
        lambda with_context_parallel: [0, 2, 4, 6],
    )
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group)
    if fits:
        check_lockstep_ranks(lockstep_ranks)
        return
    with pytest.raises(ConfigError, match=f"no part of {lockstep_ranks} neighbouring ones"):
        check_lockstep_ranks(lockstep_ranks)


@pytest.mark.parametrize(
    ("flags", "samples"),
    [
        ({"train_iters": 100, "lr_warmup_iters": 3}, 24),
        ({"train_iters": 100, "lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, 80),
        ({"train_iters": 100, "lr_decay_iters": 50, "lr_warmup_fraction": 0.01}, 4),
        ({"train_samples": 400, "lr_warmup_samples": 33}, 33),
        ({"train_samples": 400, "lr_warmup_fraction": 0.101}, 41),
    ],
)
def test_samples_of_the_warm_up(flags: dict[str, Any], samples: int) -> None:
    given: dict[str, Any] = dict.fromkeys(
        ("train_iters", "train_samples", "lr_decay_iters", "lr_decay_samples", "lr_warmup_fraction")
    )
    given |= {"global_batch_size": 8, "lr_warmup_iters": 0, "lr_warmup_samples": 0} | flags
    assert warm_up_samples(Namespace(**given)) == samples
