# SPDX-License-Identifier: Apache-2.0
"""Selectors that other packages bring, found by their entry points; docs/SELECTORS.md shows how.

Reading names imports nothing of those packages; :func:`load_selector` does.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sparsebalance_megatron.config import ConfigError, flag_name

GROUP = "sparsebalance_megatron.selectors"
"""The group of entry points: name of the selection -> an object."""

_METHODS = ("summaries", "rank", "coverage", "select")
_WORK_METHODS = ("attended_pairs", "visible_pairs", "growth", "scores_per_visible_pair")


def installed_names() -> tuple[str, ...]:
    """The names that ``--sparse-balance-selection`` takes beside the plugin's own."""
    return tuple(sorted({entry.name for entry in entry_points(group=GROUP)}))


def source_of(name: str) -> str:
    """Where an installed selector comes from, with its version: what ranks must agree on."""
    return "; ".join(sorted(map(_described, entry_points(group=GROUP, name=name))))


def load_selector(name: str) -> Any:
    """The object that an entry point names: a selector with ``by_token`` and ``work_model``.

    See :class:`.attention.selectors.Selector` and :class:`.cost.work_model.WorkModel`.

    Raises:
        ConfigError: there is no such entry point, or several, or it cannot be loaded, or what it
            names is no selector.
    """
    found = tuple(entry_points(group=GROUP, name=name))
    flag = f"{flag_name('selection')} {name}"
    if len(found) != 1:
        names = ", ".join(installed_names()) or "none"
        raise ConfigError(
            f"{flag}: {len(found)} entry points of the group {GROUP} have this name "
            f"({source_of(name) or f'installed: {names}'}); there must be one"
        )
    place = f"{flag}: the entry point {_described(found[0])}"
    try:
        selector = found[0].load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{place} cannot be loaded: {reason}; mend or uninstall it") from error
    missing = _missing(selector)
    if missing:
        raise ConfigError(
            f"{place} gives {type(selector).__name__} without {', '.join(missing)}; "
            "docs/SELECTORS.md says what a selector has"
        )
    return selector


def _missing(selector: Any) -> list[str]:
    if isinstance(selector, type):
        return ["an instance (it is a class)"]
    missing = [name for name in _METHODS if not callable(getattr(selector, name, None))]
    if not isinstance(getattr(selector, "by_token", None), bool):
        missing.append("by_token")
    work_model = getattr(selector, "work_model", None)
    return missing + [
        f"work_model.{name}"
        for name in _WORK_METHODS
        if not callable(getattr(work_model, name, None))
    ]


def _described(entry: EntryPoint) -> str:
    origin = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
    return f"{entry.name} = {entry.value}{origin}"
