# SPDX-License-Identifier: Apache-2.0
"""The settings of sparse attention in a config.json and among Megatron's arguments.

Import only after the CPU adapter has been installed.
"""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import msgspec

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.convert.hf_config import DenseModel
from sparsebalance_megatron.convert.megatron_flags import Flag
from sparsebalance_megatron.convert.weight_files import CONFIG
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
    return settings


def write_settings(directory: Path, args: Namespace | None) -> bool:
    """Put the attention that a run trained with into ``directory/config.json``.

    Args:
        args: Megatron's, of the run.

    Returns:
        Whether the run trained with the plugin; if not, the file stays as it is.
    """
    if args is None or not getattr(args, destination("enabled"), False):
        return False
    trained = config_from_args(args)
    settings = SparseAttention(
        sparse_block_size=trained.block_size,
        sparse_topk_blocks=trained.base_budget,
        sparse_selection=trained.selection,
    )
    path = directory / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    config[KEY] = msgspec.to_builtins(settings)
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    return True


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
