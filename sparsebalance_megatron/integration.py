# SPDX-License-Identifier: Apache-2.0
"""For scripts and trainers that keep their own entry point; docs/INTEGRATION.md shows all uses.

A script around ``megatron.training`` adds flags (:func:`arguments_provider`), asks whether they
turn the plugin on (:func:`is_enabled`), and hands :func:`training_hooks` to ``pretrain``.

A trainer that calls Megatron's schedules itself begins a run (:func:`begin_run`) and calls the
methods of its :class:`TrainerRun`.

A host that owns its data as well asks a :class:`HostPlanner` for plans, on any process, and begins
a run on its ranks (:func:`begin_host_run`), whose :class:`HostRun` puts them into practice. A
:class:`PlannedStep` travels as bytes; a :class:`HostJob` of a :class:`Job` and a
:class:`ModelShape` says what is planned for; :func:`window_places` deals samples to its steps.

Importing this module loads neither torch nor Megatron.
"""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from sparsebalance_megatron.command_entry import mistake_in
from sparsebalance_megatron.config import ConfigError, flag_name
from sparsebalance_megatron.text_table import one_line

if TYPE_CHECKING:
    from sparsebalance_megatron.cost.table import ModelShape
    from sparsebalance_megatron.learn.host_planner import (
        HostJob,
        HostPlanner,
        PlannedLengths,
        plan_lengths,
    )
    from sparsebalance_megatron.learn.planned_step import PlannedStep
    from sparsebalance_megatron.plan.job import Job
    from sparsebalance_megatron.plan.windows import window_places
    from sparsebalance_megatron.run.host import HostRun, begin_host_run
    from sparsebalance_megatron.run.trainer import TrainerRun, begin_run
    from sparsebalance_megatron.run.training_hooks import TrainingHooks

__all__ = [
    "HostJob",
    "HostPlanner",
    "HostRun",
    "Job",
    "ModelShape",
    "PlannedLengths",
    "PlannedStep",
    "TrainerRun",
    "arguments_provider",
    "begin_host_run",
    "begin_run",
    "is_enabled",
    "plan_lengths",
    "training_hooks",
    "window_places",
]


_ELSEWHERE = {
    "cost.table": ("ModelShape",),
    "learn.host_planner": ("HostJob", "HostPlanner", "PlannedLengths", "plan_lengths"),
    "learn.planned_step": ("PlannedStep",),
    "plan.job": ("Job",),
    "plan.windows": ("window_places",),
    "run.host": ("HostRun", "begin_host_run"),
    "run.trainer": ("TrainerRun", "begin_run"),
}
"""Modules that load numpy, or torch and Megatron, and their names: loaded when asked for."""


def __getattr__(name: str) -> Any:
    for module, names in _ELSEWHERE.items():
        if name in names:
            return getattr(import_module(f"sparsebalance_megatron.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """End at a ValueError of this package (flags, data, cost tables) with one line and status 2."""
    try:
        yield
    except (ValueError, ModuleNotFoundError) as error:
        reason = mistake_in(error)
        if reason is None:
            raise
        print(f"sparse balance: error: {one_line(reason)}", file=sys.stderr, flush=True)
        sys.exit(2)


def arguments_provider(
    other: Callable[[ArgumentParser], ArgumentParser] | None = None,
) -> Callable[[ArgumentParser], ArgumentParser]:
    """An ``extra_args_provider`` for Megatron's parser that adds ``--sparse-balance-*``, after the
    script's ``other`` provider.

    Where the command line has ``--sparse-balance``, some of Megatron's defaults change to what the
    plugin needs; explicit flags win.
    """
    from sparsebalance_megatron.megatron import cpu
    from sparsebalance_megatron.megatron.arguments import args_provider, check_typed_flags

    enabled = _flag_given()
    own = args_provider(enabled=enabled, on_cpu=cpu.installed(), report=_print_on_first_rank)

    def provide(parser: ArgumentParser) -> ArgumentParser:
        parser = own(parser if other is None else other(parser))
        if enabled:
            with one_line_errors():
                for lacking in check_typed_flags(parser, sys.argv[1:]):
                    raise ConfigError(lacking)
        return parser

    return provide


def is_enabled(args: Namespace) -> bool:
    """Whether the plugin is to train; asks Megatron's validated ``args``."""
    if not _flag_given():
        return False
    from sparsebalance_megatron.megatron.arguments import config_from_args

    with one_line_errors():
        return config_from_args(args).enabled


@one_line_errors()
def training_hooks(args: Namespace) -> "TrainingHooks":
    """Replacements for a script's dataset provider, forward step and layer spec; ``args`` are
    validated.

    Flags, data and cost table are checked here; a mistake ends the process with one line and status
    2.

    Returns:
        ``dataset_provider`` and ``forward_step`` for ``pretrain``; ``configure_model`` for the
        model's config.
    """

    from sparsebalance_megatron.megatron import cpu
    from sparsebalance_megatron.megatron.arguments import config_from_args
    from sparsebalance_megatron.run.training_hooks import make_training_hooks

    config = config_from_args(args)
    device_type = "cpu" if cpu.installed() else "cuda"
    for name, unusable in (
        ("device", config.device not in ("auto", device_type)),
        ("dry_run", config.dry_run is not None),
    ):
        if unusable:
            raise ConfigError(
                f"{flag_name(name)} {getattr(config, name)}: this script leaves no choice; use "
                "`-m sparsebalance_megatron.pretrain_gpt`, or drop the flag"
            )
    return make_training_hooks(args, device_type, _print_on_first_rank)


def _flag_given() -> bool:
    """Megatron's parser reads the same words and accepts no abbreviations."""
    return flag_name("enabled") in sys.argv[1:]


def _print_on_first_rank(message: str) -> None:
    """Process groups do not exist yet; torchrun says which rank this is."""
    if os.environ.get("RANK", "0") == "0":
        print(message, flush=True)
