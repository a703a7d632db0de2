# SPDX-License-Identifier: Apache-2.0
"""``--sparse-balance-dry-run``: everything that precedes training, then the first plan, then stop.

Imports Megatron only once the device is decided.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.megatron.datasets import quiet_imports

FLAG = flag_name("dry_run")


def is_requested(argv: Sequence[str]) -> bool:
    """Whether the command line asks for a dry run."""
    return any(word == FLAG or word.startswith(f"{FLAG}=") for word in argv)


def run(argv: Sequence[str]) -> None:
    """Check, plan the first step, print. Under torchrun only rank 0 does; the others return.

    ``argv`` are the words after the program's name.
    """
    # The flags that must be known before Megatron is imported or reads the environment.
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag_name("enabled"), dest="enabled", action="store_true")
    parser.add_argument(flag_name("device"), dest="device", default=SparseBalanceConfig().device)
    parser.add_argument(FLAG, dest="dry_run", type=int, nargs="?", const=0)
    early, _ = parser.parse_known_args(argv)
    SparseBalanceConfig(dry_run=early.dry_run)
    if not early.enabled:
        raise ConfigError(
            f"{FLAG} without --sparse-balance: there is no plan; add --sparse-balance"
        )
    if int(os.environ.get("RANK", "0")) != 0:
        return
    on_cpu = runs_on_cpu(early.device)
    with quiet_imports():
        from sparsebalance_megatron.run.described_job import plan_and_print
    plan_and_print(argv, early.dry_run, on_cpu=on_cpu)


def runs_on_cpu(device: str) -> bool:
    """Whether a process that stands for others runs on the CPU, by ``--sparse-balance-device``;
    then Megatron is made ready for it, before it is imported."""
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if on_cpu:
        from sparsebalance_megatron.megatron import cpu

        with quiet_imports():
            cpu.install()
    return on_cpu
