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
from sparsebalance_megatron.convert.hf_config import Decoder
from sparsebalance_megatron.convert.megatron_model import Flag
from sparsebalance_megatron.convert.transfer import CONFIG
from sparsebalance_megatron.errors import ConvertError
from sparsebalance_megatron.evaluate.settings import KEY, SparseAttention, checked_settings
from sparsebalance_megatron.json_file import read_json
from sparsebalance_megatron.layer_budgets import DENSE, base_budgets, layer_budgets_text
from sparsebalance_megatron.megatron.arguments import destination
from sparsebalance_megatron.megatron.training_arguments import trained_first_blocks
from sparsebalance_megatron.selector_registry import default_first_blocks


def read_settings(directory: Path, model: Decoder) -> SparseAttention | None:
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


def trained_settings(args: Namespace | None) -> SparseAttention | None:
    """The attention that a run with Megatron's ``args`` trained with; None where it is dense."""
    if args is None or not getattr(args, destination("enabled"), False):
        return None
    # The run may be of a release with other flags.
    names = ("block_size", "base_budget", "layer_budgets", "selection")
    trained = SparseBalanceConfig(**{name: getattr(args, destination(name)) for name in names})
    base_L = base_budgets(trained.base_budget, trained.layer_budgets, args.num_layers)
    if set(base_L) == {DENSE}:
        return None
    by_layer = tuple(None if budget == DENSE else budget for budget in base_L)
    dense_up_to = getattr(args, destination("dense_up_to"), "auto")
    return SparseAttention(
        sparse_block_size=trained.block_size,
        sparse_topk_blocks=trained.base_budget,
        sparse_selection=trained.selection,
        sparse_layer_topk_blocks=None if trained.layer_budgets is None else by_layer,
        # Earlier releases had no such length, and resolve what later ones leave to the costs.
        sparse_dense_up_to_tokens=SparseBalanceConfig(dense_up_to=dense_up_to).dense_up_to_tokens,
        sparse_init_block=trained_first_blocks(args),
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
    """Flags of ``pretrain_gpt`` that continue training with this attention."""
    return tuple(
        (flag_name(name),) if value is True else (flag_name(name), *str(value).split())
        for name, value in _fields(settings).items()
        if value is not None
    )


def _fields(settings: SparseAttention) -> dict[str, Any]:
    base = settings.sparse_topk_blocks
    layers = range(len(settings.sparse_layer_topk_blocks or ()))
    named = {layer: settings.base_budget(layer) for layer in layers}
    own = {layer: budget for layer, budget in named.items() if budget != base}
    has_choice = settings.first_blocks or default_first_blocks(settings.sparse_selection)
    return {
        "enabled": True,
        "block_size": settings.sparse_block_size,
        "base_budget": base,
        "layer_budgets": layer_budgets_text(own) if own else None,
        "dense_up_to": str(settings.sparse_dense_up_to_tokens),
        "selection": settings.sparse_selection,
        "first_blocks": settings.first_blocks if has_choice else None,
    }
