# SPDX-License-Identifier: Apache-2.0
"""Train a GPT: ``torchrun -m sparsebalance_megatron.pretrain_gpt FLAGS... --sparse-balance``.

Without ``--sparse-balance`` this is Megatron's own training, unchanged.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.runtime.device import early_flags


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, train.

    What the user can mend (this package's own ValueErrors: flags, data, cost tables) ends the
    process with one line and status 2; anything else keeps its traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        enabled, device_type = early_flags(argv)
        _train(enabled=enabled, device_type=device_type)
    except ValueError as error:
        if type(error).__module__.partition(".")[0] != __package__:
            raise
        print(f"sparse balance: error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


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
        print(
            f"sparse balance: {'on' if enabled else 'off'}, training on {device_type}", flush=True
        )
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
            lambda: session.monitor,
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
