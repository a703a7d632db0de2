# SPDX-License-Identifier: Apache-2.0
"""Flags and the combinations that are refused."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from dataclasses import fields

import pytest

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.runtime.arguments import (
    add_sparse_balance_args,
    args_provider,
    check_supported,
    config_from_args,
    destination,
)


def parse(*flags: str) -> Namespace:
    return add_sparse_balance_args(ArgumentParser(allow_abbrev=False)).parse_args(flags)


def supported_args(**changes: object) -> Namespace:
    """Megatron arguments that the plugin accepts, before ``changes``."""
    values = {
        "seq_length": 256,
        "data_path": ["prefix"],
        "dataloader_type": "external",
        "calculate_per_token_loss": True,
        "attention_dropout": 0.0,
    }
    return Namespace(**(values | changes))


def test_every_field_has_its_flag_and_default() -> None:
    args = parse()
    for field in fields(SparseBalanceConfig):
        assert getattr(args, destination(field.name)) == field.default
        assert flag_name(field.name).startswith("--sparse-balance")
    assert config_from_args(args) == SparseBalanceConfig()


def test_values_arrive_in_the_config() -> None:
    config = config_from_args(
        parse(
            *("--sparse-balance", "--sparse-balance-block-size", "64"),
            *("--sparse-balance-anchor", "min", "--sparse-balance-coverage-threshold", "0.2"),
        )
    )
    assert config.enabled and config.block_size == 64
    assert (config.anchor, config.coverage_threshold) == ("min", 0.2)


def test_flags_that_a_yaml_file_replaced_are_missed_by_name() -> None:
    with pytest.raises(ConfigError, match="--yaml-cfg"):
        config_from_args(Namespace())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("block_size", 0),
        ("block_size", 96),
        ("base_budget", 0),
        ("coverage_threshold", 1.0),
        ("coverage_threshold", -0.1),
        ("coverage_decay", 1.0),
        ("window", 0),
        ("max_tokens_per_micro_batch", 0),
    ],
)
def test_wrong_values_name_flag_and_value(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"{flag_name(field)} {value}: must"):
        SparseBalanceConfig(**{field: value})


@pytest.mark.parametrize(
    ("change", "other_flag"),
    [
        ({"context_parallel_size": 2}, "--context-parallel-size 2"),
        ({"hybrid_context_parallel": True}, "--hybrid-context-parallel"),
        ({"cuda_graph_impl": "local"}, "--cuda-graph-impl local"),
        ({"overlap_moe_expert_parallel_comm": True}, "--overlap-moe-expert-parallel-comm"),
        ({"fp8_dot_product_attention": True}, "--fp8-dot-product-attention"),
        ({"multi_latent_attention": True}, "--multi-latent-attention"),
        ({"experimental_attention_variant": "dsa"}, "--experimental-attention-variant dsa"),
        ({"mtp_num_layers": 1}, "--mtp-num-layers 1"),
        ({"attention_dropout": 0.1}, "--attention-dropout 0.1"),
        ({"softmax_type": "learnable"}, "--softmax-type learnable"),
        ({"window_size": (128, 0)}, "--window-size"),
        ({"qk_clip": True}, "--qk-clip"),
        ({"rampup_batch_size": [1, 1, 8]}, "--rampup-batch-size"),
        ({"mock_data": True}, "--mock-data"),
        ({"data_path": None}, "no --data-path"),
        ({"data_path": ["1", "a", "1", "b"]}, "--data-path 1 a 1 b"),
        ({"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
        ({"calculate_per_token_loss": False}, "--calculate-per-token-loss"),
        ({"tp_comm_overlap": True}, "--tp-comm-overlap"),
        ({"sft": True}, "--sft"),
        ({"attention_backend": "local"}, "--attention-backend local"),
    ],
)
def test_unsupported_combinations_name_both_flags(change: dict, other_flag: str) -> None:
    config = SparseBalanceConfig(enabled=True)
    check_supported(supported_args(), config)
    with pytest.raises(ConfigError) as caught:
        check_supported(supported_args(**change), config)
    assert str(caught.value).startswith("--sparse-balance with ")
    assert other_flag in str(caught.value)


def test_defaults_are_set_only_where_the_plugin_is_on_and_explicit_flags_win() -> None:
    def parser() -> ArgumentParser:
        parser = ArgumentParser(allow_abbrev=False)
        parser.add_argument("--dataloader-type", default=None)
        parser.add_argument("--distributed-backend", default="nccl")
        return parser

    off = args_provider(enabled=False, on_cpu=False)(parser()).parse_args([])
    assert (off.dataloader_type, off.distributed_backend) == (None, "nccl")
    on = args_provider(enabled=True, on_cpu=True)(parser()).parse_args([])
    assert (on.dataloader_type, on.distributed_backend) == ("external", "gloo")
    explicit = args_provider(enabled=True, on_cpu=True)(parser()).parse_args(
        ["--distributed-backend", "nccl"]
    )
    assert explicit.distributed_backend == "nccl"
