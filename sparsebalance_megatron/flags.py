# SPDX-License-Identifier: Apache-2.0
"""Every flag of training in three groups, modes that set several of them, and options besides.

Where a field has a value from several places, its flag wins over an option on the command line,
that over the file of ``--sparse-balance-config``, the file over ``--sparse-balance-mode``, and that
over the default.
"""

import tomllib
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any, Literal, get_origin

import msgspec

from sparsebalance_megatron.config import (
    FILE_FLAG,
    ONLY_IN_FILE,
    ConfigError,
    SparseBalanceConfig,
    flag_name,
    flag_with,
)
from sparsebalance_megatron.errors import nearest
from sparsebalance_megatron.json_file import UnreadableFileError, read_text
from sparsebalance_megatron.layer_budgets import ALL_DENSE

MODE_FLAG = "--sparse-balance-mode"

MODES: Mapping[str, Mapping[str, str]] = {
    "default": {},
    "exact": {"layer_budgets": ALL_DENSE, "tuning": "off"},
    "placement": {"tuning": "off"},
    "paper": {"batching": "latency", "tuning": "anchor"},
    "baseline": {"batching": "arrival", "tuning": "off"},
}
"""Name -> fields of :class:`.SparseBalanceConfig` that it sets."""
_WITHOUT_EFFECT: Mapping[str, frozenset[str]] = {
    "exact": frozenset(
        {"base_budget", "layer_budgets", "sensitivity", "selection", "router"}
        | {"dense_up_to", "first_blocks"}
        | {"tuning", "coverage_threshold", "eval_attention"}
    )
}
"""Mode -> fields that would have no effect beside it, and are refused."""

OTHER_FLAGS: Mapping[str, tuple[str, str]] = {
    MODE_FLAG: (
        ", ".join(f"`{mode}`" for mode in MODES),
        "What plans do, in one word: balance dense attention, which changes nothing that is learnt "
        "(exact), balance sparse attention and raise budgets where ranks would idle (default), "
        "balance at fixed budgets (placement), the paper's rule (paper), fixed budgets in order of "
        "arrival (baseline). Single flags win over it.",
    ),
    FILE_FLAG: (
        "`FILE`, `OPTION=VALUE` ...",
        "A TOML file of options by their names without --sparse-balance-, for instance "
        "base-budget = 16, or options themselves, for instance plan-ms=100. Flags win over them.",
    ),
}
"""Flags that set others: their values, and what they mean."""

_FIRST_NEEDED = ("enabled", "block_size", "base_budget", "cost_table", "log_dir", "dry_run")
_SOMETIMES_NEEDED = (
    *("coverage_threshold", "dense_up_to", "layer_budgets", "sensitivity", "selection"),
    *("first_blocks", "eval_attention", "max_tokens_per_micro_batch", "max_context_parallel"),
    *("max_segments", "window", "overlong"),
)
_NO_INTEGER = "an integer of more than 64 bits, which TOML does not have; give a smaller one"
_READ_BEFORE_THE_FILE = ("enabled", "device", "dry_run")


def flag_groups() -> dict[str, tuple[Field[Any], ...]]:
    """Title -> fields of :class:`.SparseBalanceConfig`: flags that every run needs, some runs, and
    comparisons and experts; then the options that have none."""
    by_name = {each.name: each for each in fields(SparseBalanceConfig)}
    others = {*_FIRST_NEEDED, *_SOMETIMES_NEEDED, *ONLY_IN_FILE}
    names_of = {
        "needed": _FIRST_NEEDED,
        "needed sometimes": _SOMETIMES_NEEDED,
        "for comparisons and experts": tuple(name for name in by_name if name not in others),
        f"options of {FILE_FLAG}": tuple(name for name in by_name if name in ONLY_IN_FILE),
    }
    return {title: tuple(by_name[name] for name in names) for title, names in names_of.items()}


def defaults_given_by(argv: Sequence[str]) -> dict[str, Any]:
    """Fields that the mode and the file on a command line set.

    Raises:
        ConfigError: naming the file, the option and the remedy; or an option on the command line
            that has no effect beside the mode.
    """
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(MODE_FLAG, dest="mode")
    parser.add_argument(FILE_FLAG, dest="words", nargs="*", action="extend", default=[])
    early, _ = parser.parse_known_args(argv)
    mode = early.mode
    # A wrong mode on the command line is argparse's to refuse.
    found: dict[str, Any] = dict(MODES.get(mode or "", {}))
    files = [word for word in early.words if "=" not in word]
    if len(files) > 1:
        raise ConfigError(f"{FILE_FLAG} {' '.join(files)}: give one file")
    if files:
        mode, found = _options_of(Path(files[0]), mode)
    for word in early.words:
        if word not in files:
            found |= _option_of(word, mode)
    given = {word.partition("=")[0] for word in argv}
    for name in sorted(_WITHOUT_EFFECT.get(mode or "", ())):
        if flag_name(name) in given:
            raise ConfigError(f"{flag_name(name)}: has no effect in mode {mode}; drop it")
    return found


def fields_of_mode(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Fields that a mode and options beside it set, which win.

    Raises:
        ConfigError: there is no such mode or option, or it has no effect beside the mode.
    """
    _, found = _checked({"mode": mode, **options}, "SparseBalanceConfig.of_mode", None)
    return dict(MODES[mode]) | found


def _as_option(name: str) -> str:
    return name.replace("_", "-")


def _options_of(path: Path, mode: str | None) -> tuple[str, dict[str, Any]]:
    """The mode that counts, and the fields that it and the file set."""
    place = f"{FILE_FLAG} {path}"
    try:
        given = tomllib.loads(read_text(path))
    # Python reads no integer of thousands of digits, and says so.
    except (UnreadableFileError, ValueError, RecursionError) as error:
        raise ConfigError(f"{place}: {error}; give a TOML file of options") from error
    mode, found = _checked(given, place, mode)
    return mode, dict(MODES.get(mode, {})) | found


def _checked(given: Mapping[str, Any], place: str, mode: str | None) -> tuple[str, dict[str, Any]]:
    """The mode that counts, and the fields that options set; named by their place."""
    known = {each.name: each for each in fields(SparseBalanceConfig)}
    found: dict[str, Any] = {}
    for key, value in given.items():
        name = key.replace("-", "_")
        if name in _READ_BEFORE_THE_FILE:
            raise ConfigError(f"{place}: {key} is for the command line; give {flag_name(name)}")
        if name == "mode":
            if not isinstance(value, str) or value not in MODES:
                raise ConfigError(f"{place}: mode {value}: must be one of {', '.join(MODES)}")
        elif name not in known:
            raise ConfigError(
                f"{place}: {key} is no option{nearest(key, map(_as_option, known))}; "
                "docs/FLAGS.md has them, here without --sparse-balance-"
            )
        else:
            if isinstance(value, int) and abs(value) >= 1 << 63:
                raise ConfigError(f"{place}: {key}: {_NO_INTEGER}")
            try:
                # What is one of several names is refused with all of them.
                if known[name].type is str and type(value) is int:
                    value = str(value)
                if get_origin(known[name].type) is not Literal:
                    value = msgspec.convert(value, known[name].type)
                SparseBalanceConfig(**{name: value})
            except (msgspec.ValidationError, ConfigError) as error:
                rule = str(error).removeprefix(f"{flag_with(name, value)}: ")
                shown = f"{key} {value}: " if isinstance(error, ConfigError) else f"{key}: "
                named = "" if place.startswith(f"{FILE_FLAG} {key}=") else shown
                raise ConfigError(f"{place}: {named}{rule}") from error
        if name in found:
            raise ConfigError(f"{place}: {key} is given twice; keep one")
        found[name] = value
    named = found.pop("mode", "default")
    mode = named if mode is None else mode
    if ineffective := sorted(found.keys() & _WITHOUT_EFFECT.get(mode, frozenset())):
        raise ConfigError(f"{place}: {ineffective[0]} has no effect in mode {mode}; drop it")
    return mode, found


def _option_of(word: str, mode: str | None) -> dict[str, Any]:
    """The field that ``OPTION=VALUE`` on the command line sets."""
    key, _, text = word.partition("=")
    if key == "mode":
        raise ConfigError(f"{FILE_FLAG} {word}: give {MODE_FLAG} {text}")
    try:
        (value, *others) = tomllib.loads(f"value = {text}").values()
    except (RecursionError, ValueError):
        value, others = text, []
    if others:
        raise ConfigError(f"{FILE_FLAG} {word!r}: has several options; give each as its own word")
    _, found = _checked({key: value}, f"{FILE_FLAG} {word}", mode or "default")
    return found


def in_mode(mode: str, argv: Sequence[str]) -> list[str]:
    """The words of a command line in a mode, without flags that have no effect beside it."""
    ineffective = {MODE_FLAG, *map(flag_name, _WITHOUT_EFFECT.get(mode, ()))}
    return [*without_flags(argv, ineffective.__contains__), MODE_FLAG, mode]


def without_flags(argv: Sequence[str], is_dropped: Callable[[str], bool]) -> list[str]:
    """The words of a command line but for some flags and their values."""
    words, dropped = [], False
    for word in argv:
        if word.startswith("--"):
            dropped = is_dropped(word.partition("=")[0])
        if not dropped:
            words.append(word)
    return words


def value_of(flag: str, argv: Sequence[str]) -> str | None:
    """The last value of a flag, as ``--flag value`` or ``--flag=value``."""
    found = None
    for word, after in zip(argv, [*argv[1:], None], strict=False):
        if word == flag:
            found = after
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found
