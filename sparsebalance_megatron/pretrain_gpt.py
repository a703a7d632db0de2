# SPDX-License-Identifier: Apache-2.0
"""Train a GPT: ``torchrun -m sparsebalance_megatron.pretrain_gpt <Megatron flags> --sparse-balance``.

Without ``--sparse-balance`` this is Megatron's own training, unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, train. A wrong flag ends the process with one line and status 2."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        enabled, device_type = _early_flags(argv)
        _train(enabled=enabled, device_type=device_type)
    except ConfigError as error:
        print(f"sparse balance: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


def _early_flags(argv: Sequence[str]) -> tuple[bool, str]:
    """The two flags that decide how Megatron is imported: (enabled, "cpu" or "cuda").

    Raises:
        ConfigError: if CUDA is asked for and not there.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag_name("enabled"), dest="enabled", action="store_true")
    parser.add_argument(flag_name("device"), dest="device", default=SparseBalanceConfig().device)
    early, _ = parser.parse_known_args(argv)
    visible = torch.cuda.is_available()
    if early.device == "cuda" and not visible:
        raise ConfigError(
            f"{flag_name('device')} cuda: no CUDA device is visible; use auto or cpu"
        )
    device_type = "cuda" if visible and early.device != "cpu" else "cpu"
    return early.enabled, device_type


def _train(*, enabled: bool, device_type: str) -> None:
    if device_type == "cpu":
        from sparsebalance_megatron.runtime import cpu

        cpu.install()
    from megatron.training.arguments import parse_and_validate_args

    from sparsebalance_megatron.runtime.arguments import (
        args_provider,
        check_supported,
        config_from_args,
    )

    args = parse_and_validate_args(
        extra_args_provider=args_provider(enabled=enabled, on_cpu=device_type == "cpu")
    )
    if args.rank == 0:
        print(f"sparse balance: {'on' if enabled else 'off'}, training on {device_type}", flush=True)
    if not enabled:
        _train_plain(args)
        return
    config = config_from_args(args)
    check_supported(args, config)
    _train_balanced(args, config, device_type)


def _train_plain(args: argparse.Namespace) -> None:
    from sparsebalance_megatron.compat import run_pretrain
    from sparsebalance_megatron.runtime import plain_gpt

    run_pretrain(
        args, dataset_provider=plain_gpt.dataset_provider, forward_step=plain_gpt.forward_step
    )


def _train_balanced(
    args: argparse.Namespace, config: SparseBalanceConfig, device_type: str
) -> None:
    from sparsebalance_megatron.compat import run_pretrain
    from sparsebalance_megatron.runtime.core_attention import AttentionOptions
    from sparsebalance_megatron.runtime.forward_step import ForwardStep
    from sparsebalance_megatron.runtime.inputs import read_inputs
    from sparsebalance_megatron.runtime.layer_spec import sparse_balance_layer_spec
    from sparsebalance_megatron.runtime.session import Session, distributed_provider

    inputs = read_inputs(args, config, device_type)
    device = torch.device("cpu" if device_type == "cpu" else f"cuda:{args.local_rank}")
    session = Session(args, inputs, device)
    run_pretrain(
        args,
        dataset_provider=distributed_provider(session),
        forward_step=ForwardStep(
            session,
            block_size=config.block_size,
            max_seqlen_tokens=args.seq_length,
            device=device,
            check_for_nan=args.check_for_nan_in_loss_and_grad,
        ),
        layer_spec=sparse_balance_layer_spec(AttentionOptions.from_config(config, inputs.grid)),
        variable_lengths=True,
    )


if __name__ == "__main__":
    main()
