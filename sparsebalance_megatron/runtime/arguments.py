# SPDX-License-Identifier: Apache-2.0
"""Flags: generated from the config, checked against Megatron's own before anything is built."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence
from dataclasses import Field, fields
from typing import Any

from megatron.training.argument_utils import ArgumentGroupFactory

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.runtime.cpu import MEGATRON_DEFAULTS as CPU_DEFAULTS

PLUGIN_DEFAULTS: dict[str, Any] = {
    "dataloader_type": "external",
    "calculate_per_token_loss": True,
    "attention_dropout": 0.0,
}
"""Megatron defaults that the plugin needs otherwise: its own iterator, a loss that does not depend
on how samples are grouped, and attention without dropout."""


class _PrefixedGroupFactory(ArgumentGroupFactory):
    """Megatron's flag generator with this plugin's prefix: no upstream field can collide."""

    def _format_arg_name(self, config_attr_name: str, prefix: str | None = None) -> str:
        name = flag_name(config_attr_name).removeprefix("--")
        return f"--{prefix}-{name}" if prefix else f"--{name}"

    def _build_argparse_kwargs_from_field(self, attribute: Field) -> dict[str, Any]:
        kwargs = super()._build_argparse_kwargs_from_field(attribute)
        kwargs["dest"] = destination(attribute.name)
        return kwargs


def destination(field_name: str) -> str:
    """Attribute of Megatron's ``args`` that holds a field of :class:`SparseBalanceConfig`."""
    return flag_name(field_name).removeprefix("--").replace("-", "_")


def add_sparse_balance_args(parser: ArgumentParser) -> ArgumentParser:
    """Add the group "sparse balance"; an ``extra_args_provider`` for Megatron's parser."""
    _PrefixedGroupFactory(SparseBalanceConfig).build_group(parser, title="sparse balance")
    return parser


def args_provider(*, enabled: bool, on_cpu: bool) -> Callable[[ArgumentParser], ArgumentParser]:
    """An ``extra_args_provider`` that also sets the defaults this run needs; explicit flags win."""

    def provide(parser: ArgumentParser) -> ArgumentParser:
        add_sparse_balance_args(parser)
        if on_cpu:
            parser.set_defaults(**CPU_DEFAULTS)
        if enabled:
            parser.set_defaults(**PLUGIN_DEFAULTS)
        return parser

    return provide


def config_from_args(args: Namespace) -> SparseBalanceConfig:
    """Read the plugin's config back from Megatron's ``args``.

    Raises:
        ConfigError: if a value is wrong, or if ``--yaml-cfg`` replaced the command line.
    """
    missing = [
        f.name for f in fields(SparseBalanceConfig) if not hasattr(args, destination(f.name))
    ]
    if missing:
        raise ConfigError(
            f"{flag_name(missing[0])} is not among the parsed arguments: --yaml-cfg replaces the "
            "command line; give every flag on the command line instead"
        )
    return SparseBalanceConfig(
        **{f.name: getattr(args, destination(f.name)) for f in fields(SparseBalanceConfig)}
    )


def check_supported(args: Namespace, config: SparseBalanceConfig) -> None:
    """Refuse combinations of Megatron flags with ``--sparse-balance`` that would go wrong.

    Raises:
        ConfigError: naming both flags and the remedy.
    """
    for found, other_flag, remedy in _conflicts(args, config):
        if found:
            raise ConfigError(f"--sparse-balance with {other_flag}: {remedy}")


def _conflicts(args: Namespace, config: SparseBalanceConfig) -> Sequence[tuple[bool, str, str]]:
    """(whether it is there, the other flag as given, what to do)."""

    def value(name: str, default: Any = None) -> Any:
        return getattr(args, name, default)

    cap = config.max_tokens_per_micro_batch
    return (
        (
            value("context_parallel_size", 1) > 1,
            f"--context-parallel-size {value('context_parallel_size')}",
            "context parallelism is not supported; use 1",
        ),
        (
            bool(value("hybrid_context_parallel", False)),
            "--hybrid-context-parallel",
            "both place samples; drop one of them",
        ),
        (
            value("cuda_graph_impl", "none") != "none"
            or bool(value("enable_cuda_graph", False))
            or bool(value("external_cuda_graph", False)),
            f"--cuda-graph-impl {value('cuda_graph_impl')}",
            "graphs freeze budgets and lengths; use --cuda-graph-impl none",
        ),
        (
            bool(value("overlap_moe_expert_parallel_comm", False)),
            "--overlap-moe-expert-parallel-comm",
            "its combined schedule hides micro-batch times; drop it",
        ),
        (
            bool(value("fp8_dot_product_attention")) or bool(value("fp8_multi_head_attention")),
            "--fp8-dot-product-attention",
            "attention runs in the model's dtype; drop it",
        ),
        (
            bool(value("multi_latent_attention")),
            "--multi-latent-attention",
            "budgets need plain or grouped-query attention; drop it",
        ),
        (
            value("experimental_attention_variant") is not None,
            f"--experimental-attention-variant {value('experimental_attention_variant')}",
            "both replace core attention; drop one of them",
        ),
        (
            bool(value("mtp_num_layers")),
            f"--mtp-num-layers {value('mtp_num_layers')}",
            "multi-token prediction layers are not planned; drop it",
        ),
        (
            value("attention_dropout", 0.0) > 0.0,
            f"--attention-dropout {value('attention_dropout')}",
            "block-sparse attention has no dropout; use --attention-dropout 0",
        ),
        (
            value("softmax_type", "vanilla") != "vanilla",
            f"--softmax-type {value('softmax_type')}",
            "only the plain softmax is implemented; use vanilla",
        ),
        (
            value("window_size") is not None,
            f"--window-size {value('window_size')}",
            "the block selection replaces sliding windows; drop it",
        ),
        (
            bool(value("qk_clip", False)) or bool(value("log_max_attention_logit", False)),
            "--qk-clip / --log-max-attention-logit",
            "logits of unselected blocks are never computed; drop it",
        ),
        (
            value("rampup_batch_size") is not None or value("step_batch_size_schedule") is not None,
            "--rampup-batch-size / --step-batch-size-schedule",
            "the global batch size must stay fixed; drop it",
        ),
        (
            bool(value("mock_data", False)) or not value("data_path"),
            "--mock-data" if value("mock_data", False) else "no --data-path",
            "plans need real lengths; give one prefix made by `sparse-balance prepare-data`",
        ),
        (
            len(value("data_path") or [""]) > 1,
            f"--data-path {' '.join(map(str, value('data_path') or []))}",
            "blends are not supported; give one prefix",
        ),
        (
            value("dataloader_type") != "external",
            f"--dataloader-type {value('dataloader_type')}",
            "the plugin brings its own iterator; use external or drop the flag",
        ),
        (
            not value("calculate_per_token_loss", False),
            "per-sample loss",
            "regrouping needs --calculate-per-token-loss",
        ),
        (
            bool(value("tp_comm_overlap", False)),
            "--tp-comm-overlap",
            "its buffers need a fixed sequence length; drop it",
        ),
        (
            bool(value("sft", False)),
            "--sft",
            "prepare conversations with `sparse-balance prepare-data` and drop it",
        ),
        (
            value("attention_backend", None) is not None
            and getattr(args.attention_backend, "name", str(args.attention_backend)) == "local",
            "--attention-backend local",
            "Megatron would replace the plugin's attention; drop it",
        ),
        (
            cap is not None and cap < args.seq_length,
            f"--seq-length {args.seq_length}",
            f"{flag_name('max_tokens_per_micro_batch')} {cap} cannot hold one longest sample; "
            f"use at least {args.seq_length}",
        ),
    )
