# SPDX-License-Identifier: Apache-2.0
"""``--sparse-balance-dry-run``: everything that precedes training, then the first plan, then stop.

One process stands for all ranks: no process group, no device, nothing written. Flags go through
Megatron's own validation and data, costs and plan through the code that training runs, so what
passes here is what training starts from. Imports Megatron only once the device is decided.
"""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.megatron.datasets import quiet_imports

FLAG = flag_name("dry_run")
_SHARDED_PARAMETERS = {"--use-torch-fsdp2", "--use-megatron-fsdp"}


def is_requested(argv: Sequence[str]) -> bool:
    """Whether the command line asks for a dry run."""
    return any(word == FLAG or word.startswith(f"{FLAG}=") for word in argv)


def run(argv: Sequence[str]) -> None:
    """Check, plan the first step, print. Under torchrun only rank 0 does; the others return.

    ``argv`` are the words of ``sys.argv``, which Megatron's parser reads.
    """
    early = _early_flags(argv)
    if not early.enabled:
        raise ConfigError(
            f"{FLAG} without --sparse-balance: there is no plan; add --sparse-balance"
        )
    if int(os.environ.get("RANK", "0")) != 0:
        return
    if early.device == "cpu" or not torch.cuda.is_available():
        from sparsebalance_megatron.megatron import cpu

        with quiet_imports():
            cpu.install()
    with _world(early.dry_run, connections="8" if _SHARDED_PARAMETERS & set(argv) else "1"):
        with quiet_imports():
            from sparsebalance_megatron.run.dry_run_report import plan_and_print
        plan_and_print("cpu" if early.device == "cpu" else "cuda", argv)


def _early_flags(argv: Sequence[str]) -> Namespace:
    """The flags that must be known before Megatron is imported or reads the environment."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag_name("enabled"), dest="enabled", action="store_true")
    parser.add_argument(flag_name("device"), dest="device", default=SparseBalanceConfig().device)
    parser.add_argument(FLAG, dest="dry_run", type=int, nargs="?", const=0)
    early, _ = parser.parse_known_args(argv)
    SparseBalanceConfig(dry_run=early.dry_run)
    return early


@contextmanager
def _world(size: int, *, connections: str) -> Iterator[None]:
    """Be rank 0 of ``size`` ranks, or of those launched if 0, in the environment.

    Megatron demands 1 connection to a device of some layouts, and more with sharded parameters,
    for the order of kernels; none runs here.
    """
    size = size or int(os.environ.get("WORLD_SIZE", "1"))
    place = {"WORLD_SIZE": str(size), "RANK": "0", "LOCAL_RANK": "0"}
    place["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get(
        "CUDA_DEVICE_MAX_CONNECTIONS", connections
    )
    saved = {name: os.environ.get(name) for name in place}
    os.environ.update(place)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
