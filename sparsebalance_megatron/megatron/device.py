# SPDX-License-Identifier: Apache-2.0
"""Which device a run takes, decided before Megatron is imported. Imports no Megatron."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name


def early_flags(argv: Sequence[str]) -> tuple[bool, str]:
    """The two flags that decide how Megatron is imported.

    Returns:
        Whether ``--sparse-balance`` is given, and "cpu" or "cuda".

    Raises:
        ConfigError: if CUDA is asked for and not there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag_name("enabled"), dest="enabled", action="store_true")
    parser.add_argument(flag_name("device"), dest="device", default=SparseBalanceConfig().device)
    early, _ = parser.parse_known_args(argv)
    visible = torch.cuda.is_available()
    if early.device == "cuda" and not visible:
        raise ConfigError(f"{flag_name('device')} cuda: no CUDA device is visible; use auto or cpu")
    device_type = "cuda" if visible and early.device != "cpu" else "cpu"
    return early.enabled, device_type
