# SPDX-License-Identifier: Apache-2.0
"""Megatron in one process, for tools that measure or convert a model instead of training it.

Import only after the CPU adapter has been installed where it is needed.
"""

import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
from megatron.training.global_vars import set_global_variables

from sparsebalance_megatron.megatron.arguments import args_provider


def parse_flags(program: str, flags: Sequence[str], *, enabled: bool, on_cpu: bool) -> Namespace:
    """Megatron's arguments and the plugin's, not validated yet; ``program`` is for usage messages.

    Megatron's defaults become those that the plugin needs if ``enabled``, and those of a CPU.
    """
    # Megatron's parser reads ``sys.argv`` and nothing else.
    saved, sys.argv = sys.argv, [f"{program} --", *flags]
    try:
        return parse_args(args_provider(enabled=enabled, on_cpu=on_cpu))
    finally:
        sys.argv = saved


def complete_flags(args: Namespace, *, set_globals: bool) -> None:
    """Check and complete arguments as Megatron does; set its globals if modules ask for them."""
    validate_args(args)
    if set_globals:
        set_global_variables(args)


def transformer_config(args: Namespace) -> Any:
    """The ``TransformerConfig`` that completed arguments describe."""
    return core_transformer_config_from_args(args)


def start_single_process(seed: int, device: torch.device) -> None:
    """Start a world of one rank, as far as Megatron's modules and checkpoints need it."""
    start_process_group(device)
    parallel_state.initialize_model_parallel()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)


def start_process_group(device: torch.device) -> None:
    """Start the process group of a world of one rank."""
    torch.distributed.init_process_group(
        backend="gloo" if device.type == "cpu" else "nccl",
        store=torch.distributed.HashStore(),
        rank=0,
        world_size=1,
    )


@contextmanager
def data_parallel_world(device: torch.device) -> Iterator[None]:
    """Start a world of the ranks that torchrun started, each a replica; end it with the block."""
    torch.distributed.init_process_group("gloo" if device.type == "cpu" else "nccl")
    parallel_state.initialize_model_parallel()
    yield
    torch.distributed.barrier()
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
