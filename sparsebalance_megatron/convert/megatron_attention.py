# SPDX-License-Identifier: Apache-2.0
"""The settings of sparse attention in a config.json and among Megatron's arguments.

Import only after the CPU adapter has been installed.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.convert.hf_config import DenseModel
from sparsebalance_megatron.convert.megatron_model import Flag
from sparsebalance_megatron.convert.transfer import CONFIG
from sparsebalance_megatron.errors import ConvertError
from sparsebalance_megatron.evaluate.settings import KEY, SparseAttention, checked_settings
from sparsebalance_megatron.json_file import read_json
from sparsebalance_megatron.megatron.arguments import config_from_args, destination


def read_settings(directory: Path, model: DenseModel) -> SparseAttention | None:
    """The settings in ``directory/config.json``; None where it has none.

    Raises:
        ConvertError: one is missing or wrong, or training cannot follow it.
    """
    path = directory / CONFIG
    values = read_json(path).get(KEY)
    if values is None:
        return None
    try:
        settings = checked_settings(values, model)
        SparseBalanceConfig(**_fields(settings))
    except ConfigError as error:
        raise ConvertError(f"{path}: {error}") from error
    budget = settings.sparse_topk_blocks
    always_whole_tokens = settings.sparse_block_size * budget
    for name, followed in (
        ("sparse_layer_topk_blocks", set(settings.sparse_layer_topk_blocks or ()) <= {budget}),
        ("sparse_dense_up_to_tokens", settings.sparse_dense_up_to_tokens <= always_whole_tokens),
    ):
        if not followed:
            raise ConvertError(
                f"{path}: {KEY}: {name}: training has one base budget for all layers and lengths, "
                f"sparse_topk_blocks, here {budget}; remove {name}, and set it again in the model "
                "that is evaluated"
            )
    return settings


def trained_settings(args: Namespace | None) -> SparseAttention | None:
    """The attention that a run with Megatron's ``args`` trained with; None without the plugin."""
    if args is None or not getattr(args, destination("enabled"), False):
        return None
    trained = config_from_args(args)
    return SparseAttention(
        sparse_block_size=trained.block_size,
        sparse_topk_blocks=trained.base_budget,
        sparse_selection=trained.selection,
    )


def write_settings(directory: Path, settings: SparseAttention) -> None:
    """Put the settings into ``directory/config.json``."""
    path = directory / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config[KEY] = settings.as_config()
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def set_arguments(args: Namespace, settings: SparseAttention) -> None:
    """Set Megatron's arguments as a run with these settings has them."""
    for name, value in _fields(settings).items():
        setattr(args, destination(name), value)


def training_flags(settings: SparseAttention) -> tuple[Flag, ...]:
    """What ``pretrain_gpt`` must be told to train on with this attention."""
    return tuple(
        (flag_name(name),) if value is True else (flag_name(name), str(value))
        for name, value in _fields(settings).items()
    )


def _fields(settings: SparseAttention) -> dict[str, Any]:
    return {
        "enabled": True,
        "block_size": settings.sparse_block_size,
        "base_budget": settings.sparse_topk_blocks,
        "selection": settings.sparse_selection,
    }
