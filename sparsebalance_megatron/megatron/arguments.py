# SPDX-License-Identifier: Apache-2.0
"""Flags: generated from the config; Megatron's own get the defaults that this plugin needs.

Importing this module does not load Megatron.
"""

import os
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, NoReturn

import torch

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig, flag_name
from sparsebalance_megatron.cost.dense_length import check_dense_length
from sparsebalance_megatron.errors import with_nearest
from sparsebalance_megatron.flags import (
    FILE_FLAG,
    MODE_FLAG,
    MODES,
    OTHER_FLAGS,
    defaults_given_by,
    flag_groups,
)
from sparsebalance_megatron.megatron import cpu
from sparsebalance_megatron.megatron.datasets import quiet_imports
from sparsebalance_megatron.megatron.unsupported import (
    check_global_batch,
    check_supported,
    not_installed,
)
from sparsebalance_megatron.text_table import one_line

PLUGIN_DEFAULTS: dict[str, Any] = {
    "dataloader_type": "external",
    "calculate_per_token_loss": True,
    "attention_dropout": 0.0,
}
"""Megatron defaults that the plugin needs otherwise: its own iterator, a loss that does not depend
on how samples are grouped, and attention without dropout."""

WITHOUT_SIDE_EFFECTS: dict[str, Any] = {
    "tensorboard_dir": None,
    "wandb_project": "",
    "enable_one_logger": False,
    "adlr_autoresume": False,
}
"""Megatron arguments by which ``set_global_variables`` writes files or calls a service."""


def early_flags(argv: Sequence[str]) -> Namespace:
    """``enabled``, ``device`` and ``dry_run``: flags that must be known before Megatron is
    imported, or reads the environment."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag_name("enabled"), dest="enabled", action="store_true")
    parser.add_argument(flag_name("device"), dest="device", default=SparseBalanceConfig().device)
    parser.add_argument(flag_name("dry_run"), dest="dry_run", type=int, nargs="?", const=0)
    early, _ = parser.parse_known_args(argv)
    return early


def device_type_of(argv: Sequence[str]) -> str:
    """Where a command line trains, "cpu" or "cuda": how Megatron must be imported."""
    device, visible = early_flags(argv).device, torch.cuda.is_available()
    if device == "cuda" and not visible:
        raise ConfigError(f"{flag_name('device')} cuda: no CUDA device is visible; use auto or cpu")
    return "cuda" if visible and device != "cpu" else "cpu"


def runs_on_cpu(device: str) -> bool:
    """Whether a process that stands for others runs on the CPU, by ``--sparse-balance-device``;
    then Megatron is made ready for it, before it is imported."""
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    if on_cpu:
        with quiet_imports():
            cpu.install()
    return on_cpu


def destination(field_name: str) -> str:
    """Attribute of Megatron's ``args`` that holds a field of :class:`SparseBalanceConfig`."""
    return "sparse_balance" if field_name == "enabled" else f"sparse_balance_{field_name}"


def add_sparse_balance_args(
    parser: ArgumentParser, argv: Sequence[str] | None = None
) -> ArgumentParser:
    """Add three groups of flags by Megatron's generator, with this plugin's prefix; defaults are
    what a mode and a file of options in ``argv``, or the process's words, set."""
    # Trainers that own their loop have no flags and need not load it.
    from megatron.training.argument_utils import ArgumentGroupFactory

    class PrefixedGroupFactory(ArgumentGroupFactory):
        def _format_arg_name(self, config_attr_name: str, prefix: str | None = None) -> str:
            name = flag_name(config_attr_name).removeprefix("--")
            return f"--{prefix}-{name}" if prefix else f"--{name}"

        def _build_argparse_kwargs_from_field(self, attribute: Field) -> dict[str, Any]:
            kwargs = super()._build_argparse_kwargs_from_field(attribute)
            kwargs["dest"] = destination(attribute.name)
            return kwargs

    *groups, (_, only_in_file) = flag_groups().items()
    for number, (title, group) in enumerate(groups):
        own = {each.name for each in group}
        others = [each.name for each in fields(SparseBalanceConfig) if each.name not in own]
        added = PrefixedGroupFactory(SparseBalanceConfig, exclude=others).build_group(
            parser, title=f"sparse balance, {title}"
        )
        if number == 0:
            added.add_argument(MODE_FLAG, choices=tuple(MODES), help=OTHER_FLAGS[MODE_FLAG][1])
            values, text = "FILE | OPTION=VALUE", OTHER_FLAGS[FILE_FLAG][1]
            added.add_argument(FILE_FLAG, nargs="+", action="extend", metavar=values, help=text)
        else:
            added.description = None
    # A length that nobody gives may be a checkpoint's (:func:`.settle_attention`).
    given = {each.name: each.default for each in only_in_file} | {"dense_up_to": None}
    given |= defaults_given_by(sys.argv[1:] if argv is None else argv)
    parser.set_defaults(**{destination(name): value for name, value in given.items()})
    return parser


def args_provider(
    *,
    enabled: bool,
    on_cpu: bool,
    report: Callable[[str], None] | None = None,
    stands_in: bool = False,
) -> Callable[[ArgumentParser], ArgumentParser]:
    """An ``extra_args_provider`` that also sets the defaults this run needs; explicit flags win.
    ``report`` is told, in one line, which of Megatron's defaults change. A process that stands in
    for ranks of other machines leaves out those of this one, and raises a parser's errors."""

    def provide(parser: ArgumentParser) -> ArgumentParser:
        _cut_long_errors(parser, _refuse if stands_in else parser.error)
        add_sparse_balance_args(parser)
        _make_help_printable(parser)
        own = PLUGIN_DEFAULTS if enabled else {}
        changed = (cpu.MEGATRON_DEFAULTS if on_cpu else {}) | own
        added = _as_flags(parser, own if stands_in else changed, sys.argv[1:]) if report else []
        parser.set_defaults(**changed)
        if report and added:
            report(f"sparse balance: trains as if given {' '.join(added)}")
        return parser

    return provide


def _cut_long_errors(parser: ArgumentParser, end: Callable[[str], NoReturn]) -> None:
    """Have a parser's errors, which repeat the words that were given, be one line each."""
    flags = parser._option_string_actions
    parser.error = lambda message: end(one_line(with_nearest(message, flags)))  # type: ignore[method-assign]


def _refuse(message: str) -> NoReturn:
    raise ConfigError(message)


def _make_help_printable(parser: ArgumentParser) -> None:
    """Double percent signs that argparse cannot format: megatron-core 0.19 has a bare one."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def _as_flags(
    parser: ArgumentParser, defaults: Mapping[str, Any], argv: Sequence[str]
) -> list[str]:
    """The flags that would say the same as ``defaults``; none for what ``argv`` says itself."""
    given = {word.partition("=")[0] for word in argv}
    flags = []
    for action in parser._actions:
        is_new = action.dest in defaults and defaults[action.dest] != action.default
        if is_new and given.isdisjoint(action.option_strings):
            value = [] if action.nargs == 0 else [str(defaults[action.dest])]
            flags.append(" ".join([action.option_strings[0], *value]))
    return flags


def check_typed_flags(parser: ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Refuse what is not supported with ``--sparse-balance`` before Megatron's own assertions speak
    of something else, in a traceback; give a sentence for each package that training lacks here."""
    args, _ = parser.parse_known_args(argv)
    # Where Megatron's parser takes it from, too.
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    config = config_from_args(args)
    check_supported(args, config)
    check_dense_length(config, args.seq_length)
    check_global_batch(args)
    return not_installed(args)


def arguments_without_ranks(
    argv: Sequence[str], *, on_cpu: bool, report: Callable[[str], None]
) -> Namespace:
    """Megatron's arguments as training gets them, in a process that stands for all ranks; nothing
    is written and no service is called. ``argv`` are the words of ``sys.argv``."""
    with warnings.catch_warnings():
        # Megatron warns of libraries that this machine lacks; training may run on another.
        warnings.simplefilter("ignore")
        from megatron.training.arguments import parse_args, validate_args
        from megatron.training.checkpointing import load_args_from_checkpoint
        from megatron.training.global_vars import set_global_variables, unset_global_variables
        from megatron.training.training import get_optimizer_param_scheduler

    # A process may look at several command lines, one after the other.
    unset_global_variables()
    add_flags = args_provider(enabled=True, on_cpu=on_cpu, report=report, stands_in=True)

    def add_and_check_flags(parser: ArgumentParser) -> ArgumentParser:
        parser = add_flags(parser)
        for lacking in check_typed_flags(parser, argv):
            report(f"sparse balance: training: {lacking}")
        return parser

    args: Namespace = parse_args(add_and_check_flags)
    if args.use_checkpoint_args:
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    validate_args(args)
    for name in WITHOUT_SIDE_EFFECTS.keys() & vars(args).keys():
        setattr(args, name, WITHOUT_SIDE_EFFECTS[name])
    set_global_variables(args)
    # Checks learning rate and weight decay over time, for an optimizer without parameters.
    get_optimizer_param_scheduler(Namespace(param_groups=[]))
    return args


def config_from_args(args: Namespace) -> SparseBalanceConfig:
    """Read the plugin's config back from Megatron's ``args``."""
    names = [each.name for each in fields(SparseBalanceConfig)]
    if missing := [name for name in names if not hasattr(args, destination(name))]:
        raise ConfigError(
            f"{flag_name(missing[0])} is not among the parsed arguments: --yaml-cfg replaces the "
            "command line; give every flag on the command line instead"
        )
    values = {name: getattr(args, destination(name)) for name in names}
    values["dense_up_to"] = values["dense_up_to"] or "auto"
    return SparseBalanceConfig(**values)
