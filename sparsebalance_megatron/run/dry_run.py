# SPDX-License-Identifier: Apache-2.0
"""``--sparse-balance-dry-run``: everything that precedes training, then the first plan, then stop.

One process stands for all ranks: no process group, no device, nothing written. Flags go through
Megatron's own validation and data, costs and plan through the code that training runs, so what
passes here is what training starts from. Imports Megatron only once the device is decided.
"""

from __future__ import annotations

import argparse
import io
import os
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from importlib.util import find_spec
from pathlib import Path

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.megatron.datasets import quiet_imports

FLAG = flag_name("dry_run")
_PREDICTED_STEPS = 2
"""As many as ``sparse-balance advise`` plans by default, of the same samples."""


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
    with _world(early.dry_run):
        _plan_and_print("cpu" if early.device == "cpu" else "cuda", argv)


def _plan_and_print(device_type: str, argv: Sequence[str]) -> None:
    with quiet_imports():
        from sparsebalance_megatron.cost.fit import counted_cost_model
        from sparsebalance_megatron.log.log_directory import LogDirectory
        from sparsebalance_megatron.megatron.arguments import config_from_args
        from sparsebalance_megatron.megatron.settings import RunSettings
        from sparsebalance_megatron.megatron.unsupported import check_supported
        from sparsebalance_megatron.run.dry_run_report import describe
        from sparsebalance_megatron.run.inputs import (
            CostedInputs,
            read_inputs,
        )
        from sparsebalance_megatron.run.samples import largest_evaluation_step, make_scheduler

    changed_defaults: list[str] = []
    with _without_argument_dump():
        args, unchecked = _validated_args(device_type, argv, changed_defaults.append)
    for line in changed_defaults:
        print(line)
    config = config_from_args(args)
    check_supported(args, config)
    if config.log_dir is not None and (remark := LogDirectory(config.log_dir).check()):
        unchecked.append(remark)
    settings = RunSettings.from_args(args)
    inputs = read_inputs(settings, config, device_type)
    if not isinstance(inputs, CostedInputs):
        inputs = inputs.with_cost(counted_cost_model(config, settings.shape))
        unchecked.append("costs: --sparse-balance-cost-table auto measures when training starts")
    scheduler = make_scheduler(inputs)
    first = scheduler.planned(0)
    later = [step.plan for step in inputs.workload(_PREDICTED_STEPS).planned_steps()]
    print("\n".join(describe(args, inputs, first, later, unchecked)), flush=True)
    if inputs.valid is not None:
        largest = largest_evaluation_step(inputs, inputs.valid, scheduler.coverage).plan
        tokens_RM = largest.rank_tokens_RM()
        print(
            f"largest validation batch: {tokens_RM.sum():,.0f} tokens, at most "
            f"{tokens_RM.max():,.0f} of a micro-batch on one rank",
            flush=True,
        )


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
def _world(size: int) -> Iterator[None]:
    """Be rank 0 of ``size`` ranks, or of those launched if 0, for whoever asks the environment."""
    size = size or int(os.environ.get("WORLD_SIZE", "1"))
    place = {"WORLD_SIZE": str(size), "RANK": "0", "LOCAL_RANK": "0"}
    # Megatron demands it of some layouts, for the order of kernels on a device; none runs here.
    place["CUDA_DEVICE_MAX_CONNECTIONS"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "1")
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


@contextmanager
def _without_argument_dump() -> Iterator[None]:
    """Print only warnings of Megatron's output, or all of it if Megatron ends the process."""
    output = io.StringIO()
    try:
        with redirect_stdout(output):
            yield
    except SystemExit:
        print(output.getvalue(), end="")
        raise
    for line in output.getvalue().splitlines():
        if line.startswith("WARNING"):
            print(line)


@contextmanager
def _one_line_refusals() -> Iterator[None]:
    """Turn what Megatron, or a tokenizer, raises at wrong flags into one :class:`ConfigError`."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("sparsebalance_megatron"):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]
        reason = str(error).strip().partition("\n")[0] or frame.line
        raise ConfigError(
            f"Megatron refuses the flags ({Path(frame.filename).name}:{frame.lineno}): {reason}"
        ) from error


def _validated_args(
    device_type: str, argv: Sequence[str], report: Callable[[str], None]
) -> tuple[Namespace, list[str]]:
    """Megatron's arguments as training gets them, and what had to be left unchecked."""
    from sparsebalance_megatron.megatron.arguments import arguments_without_ranks

    with _one_line_refusals():
        args = arguments_without_ranks(argv, on_cpu=device_type == "cpu", report=report)
    unchecked = [
        "whether memory suffices: it is counted below, not tried",
        "processes, the network and its libraries (NCCL)",
        "attention kernels",
    ]
    if args.load or args.pretrained_checkpoint:
        unchecked.append("checkpoints; the plan is that of a run from the start")
    if args.transformer_impl == "transformer_engine" and find_spec("transformer_engine") is None:
        # Megatron's model config refuses fused RoPE where the library that has it is missing.
        args.apply_rope_fusion = False
        unchecked.append("flags that need Transformer Engine, which is not installed here")
    return args, unchecked
