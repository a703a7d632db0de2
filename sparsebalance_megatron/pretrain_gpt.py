# SPDX-License-Identifier: Apache-2.0
"""Train a GPT: ``torchrun -m sparsebalance_megatron.pretrain_gpt FLAGS... --sparse-balance``.

Without ``--sparse-balance`` this is Megatron's own training, unchanged.
"""

import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext

from sparsebalance_megatron import integration
from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.errors import one_line_refusals


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, train.

    What the user can mend (this package's own ValueErrors: flags, data, cost tables) ends the
    process with one line and status 2; anything else keeps its traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    with integration.one_line_errors():
        from sparsebalance_megatron.megatron.arguments import device_type_of, early_flags

        early = early_flags(argv)
        if early.dry_run is not None:
            _dry_run(argv, early)
        else:
            _train(device_type_of(argv))


def _dry_run(argv: Sequence[str], early: Namespace) -> None:
    """Check, plan the first step, print. Under torchrun only rank 0 does; the others return."""
    from sparsebalance_megatron.megatron.arguments import runs_on_cpu
    from sparsebalance_megatron.megatron.datasets import quiet_imports

    SparseBalanceConfig(dry_run=early.dry_run)
    if not early.enabled:
        raise ConfigError(
            f"{flag_name('dry_run')} without --sparse-balance: there is no plan; add "
            "--sparse-balance"
        )
    if int(os.environ.get("RANK", "0")) != 0:
        return
    on_cpu = runs_on_cpu(early.device)
    with quiet_imports():
        from sparsebalance_megatron.cli.dry_run import plan_and_print
    plan_and_print(argv, early.dry_run, on_cpu=on_cpu)


def _train(device_type: str) -> None:
    if device_type == "cpu":
        from sparsebalance_megatron.megatron import cpu

        cpu.install()
    from sparsebalance_megatron.megatron.arguments import early_flags
    from sparsebalance_megatron.megatron.compat import run_pretrain, validated_arguments

    provider = integration.arguments_provider()
    is_given = early_flags(sys.argv[1:]).enabled
    with one_line_refusals() if is_given else nullcontext():
        args = validated_arguments(provider)
    enabled = integration.is_enabled(args)
    if args.rank == 0:
        print(
            f"sparse balance: {'on' if enabled else 'off'}, training on {device_type}", flush=True
        )
    if enabled:
        from sparsebalance_megatron.run.failure_report import failure_report

        hooks = integration.training_hooks(args)
        with failure_report(
            rank=args.rank,
            world_size=args.world_size,
            save=args.save,
            iteration=lambda: getattr(args, "curr_iteration", -1) + 1,
        ):
            run_pretrain(
                args,
                dataset_provider=hooks.dataset_provider,
                forward_step=hooks.forward_step,
                configure_model=hooks.configure_model,
            )
    else:
        from sparsebalance_megatron.megatron import plain_gpt

        run_pretrain(
            args, dataset_provider=plain_gpt.dataset_provider, forward_step=plain_gpt.forward_step
        )


def _end_with(parent_id: int) -> None:
    """End this process when the one that started it is gone."""
    while os.getppid() == parent_id:
        time.sleep(1.0)
    os._exit(1)


if "--multiprocessing-fork" in sys.orig_argv:
    # Megatron's checkpoint writer is such a process, and would outlive a rank that is killed.
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

if __name__ == "__main__":
    main()
