# SPDX-License-Identifier: Apache-2.0
"""Every selection by its name: this package's and those that other packages bring.

Both are entry points, "module:OBJECT", and are loaded when they are asked for. Other packages
declare theirs in the group :data:`GROUP`; docs/EXTENDING.md shows how.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sparsebalance_megatron.errors import ConfigError

GROUP = "sparsebalance_megatron.selectors"
"""The group of entry points: name of the selection -> an object."""
FLAG = "--sparse-balance-selection"

_METHODS = ("summaries", "rank", "coverage", "select")
_WORK_METHODS = (
    *("attended_pairs", "visible_pairs", "growth", "scores_per_visible_pair"),
    "list_entries_per_token",
)


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """Objects of one selection, below this package, and a clause for the flag's help.

    The work model is named apart from the selector, so that planning does without torch.
    ``first_blocks``: of a document, which every query reads by default; None for no choice.
    """

    selector: str
    work_model: str
    summary: str
    first_blocks: int | None = 1
    needs_whole_documents: bool = False


BUILT_IN: Mapping[str, BuiltIn] = {
    "token-query-head": BuiltIn(
        selector="attention.select.block_topk:TOKEN_QUERY_HEAD",
        work_model="cost.work_model:TOKEN_QUERY_HEAD",
        summary="a token per query head, as MoBA does",
    ),
    "token-kv-head": BuiltIn(
        selector="attention.select.block_topk:TOKEN_KV_HEAD",
        work_model="cost.work_model:TOKEN_KV_HEAD",
        summary="a token per KV head",
    ),
    "previous-block": BuiltIn(
        selector="attention.select.block_topk:PREVIOUS_BLOCK",
        work_model="cost.work_model:QUERY_BLOCK",
        summary="a block of queries per KV head, by the mean query of the block before it",
    ),
    "vertical-slash": BuiltIn(
        selector="attention.select.vertical_slash:VERTICAL_SLASH",
        work_model="cost.work_model:VERTICAL_SLASH",
        summary="columns and diagonals of keys that queries of the block before attend to",
        first_blocks=None,
    ),
    "vertical-slash-last-queries": BuiltIn(
        selector="attention.select.vertical_slash:LAST_QUERIES",
        work_model="cost.work_model:VERTICAL_SLASH",
        summary="those that a document's last queries attend to, as in MTraining; looks ahead",
        first_blocks=None,
        needs_whole_documents=True,
    ),
}
"""Value of the flag -> selection."""


def flag_help() -> str:
    """The help of the flag, with every selection of this package."""
    each = "; ".join(f"{name}: {entry.summary}" for name, entry in BUILT_IN.items())
    return (
        f"Who selects the blocks that a token reads (docs/TUNING.md). {each}. Packages add further "
        "names (docs/EXTENDING.md)."
    )


def names() -> tuple[str, ...]:
    """Names that the flag takes."""
    installed = {entry.name for entry in entry_points(group=GROUP)}
    return (*BUILT_IN, *sorted(installed - BUILT_IN.keys()))


def check_name(name: str) -> None:
    """Refuse an unknown name, without loading anything."""
    if name not in BUILT_IN and name not in names():
        raise ConfigError(
            f"{FLAG} {name}: must be one of {', '.join(names())} "
            f"(other packages add names by entry points of {GROUP})"
        )


def default_first_blocks(name: str) -> int:
    """First blocks of a document that a selection reads by default; those of other packages read
    what they choose, and are taken to read none."""
    return (BUILT_IN[name].first_blocks or 0) if name in BUILT_IN else 0


def source_of(name: str) -> str:
    """Package and version of another package's selector, on which ranks must agree, or ""."""
    return "" if name in BUILT_IN else "; ".join(sorted(map(_described, _installed(name))))


def load_selector(name: str) -> Any:
    """The object of a selection; see :class:`.attention.select.Selector`."""
    if name in BUILT_IN:
        return _of_this_package(BUILT_IN[name].selector).load()
    check_name(name)
    found = _installed(name)
    if len(found) > 1:
        raise ConfigError(
            f"{FLAG} {name}: {len(found)} entry points of the group {GROUP} have this name "
            f"({source_of(name)}); uninstall all but one"
        )
    place = f"{FLAG} {name}: the entry point {_described(found[0])}"
    try:
        selector = found[0].load()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"{place} cannot be loaded: {reason}; mend or uninstall it") from error
    missing = _missing(selector)
    if missing:
        raise ConfigError(
            f"{place} gives {type(selector).__name__} without {', '.join(missing)}; "
            "docs/EXTENDING.md says what a selector has"
        )
    return selector


def load_work_model(name: str) -> Any:
    """The work model of a selection; see :class:`.cost.work_model.WorkModel`."""
    if name in BUILT_IN:
        return _of_this_package(BUILT_IN[name].work_model).load()
    return load_selector(name).work_model


def check_whole_documents(name: str, parts: Mapping[str, int]) -> None:
    """Refuse a selection whose probes are a document's last queries where documents are divided:
    ``parts`` has, by flag, among how many ranks or into how many segments."""
    flag = next((flag for flag, count in parts.items() if count > 1), None)
    if flag is None:
        return
    built_in = BUILT_IN.get(name)
    needs = built_in or load_selector(name)
    if getattr(needs, "needs_whole_documents", False):
        raise ConfigError(
            f"{FLAG} {name} with {flag} {parts[flag]}: its probes are the last queries of a "
            f"sequence, which one rank must hold in one piece; use vertical-slash, or {flag} 1"
        )


def _of_this_package(place: str) -> EntryPoint:
    return EntryPoint(name=place, value=f"{__package__}.{place}", group=GROUP)


def _installed(name: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP, name=name))


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
