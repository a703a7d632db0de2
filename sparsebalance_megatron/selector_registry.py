# SPDX-License-Identifier: Apache-2.0
"""Every selection and budget policy by its name: this package's and those of other packages.

Both are entry points, "module:OBJECT", and are loaded when they are asked for. Other packages
declare theirs in the groups of :data:`SELECTORS` and :data:`POLICIES`; docs/EXTENDING.md shows how.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from sparsebalance_megatron.errors import ConfigError

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
}
"""Value of the flag -> selection."""


def flag_help() -> str:
    """The help of the flag, with every selection of this package."""
    each = "; ".join(f"{name}: {entry.summary}" for name, entry in BUILT_IN.items())
    return (
        f"Who selects the blocks that a token reads (docs/TUNING.md). {each}. Packages add further "
        "names (docs/EXTENDING.md)."
    )


def default_first_blocks(name: str) -> int:
    """First blocks of a document that a selection reads by default; those of other packages read
    what they choose, and are taken to read none."""
    return (BUILT_IN[name].first_blocks or 0) if name in BUILT_IN else 0


def load_work_model(name: str) -> Any:
    """The work model of a selection; see :class:`.cost.work_model.WorkModel`."""
    if name in BUILT_IN:
        return _of_this_package(BUILT_IN[name].work_model).load()
    return SELECTORS.load(name).work_model


def load_selector(name: str) -> Any:
    """The object of a selection; see :class:`.attention.select.Selector`."""
    if name in BUILT_IN:
        return _of_this_package(BUILT_IN[name].selector).load()
    return SELECTORS.load(name)


def _of_this_package(place: str) -> EntryPoint:
    return EntryPoint(name=place, value=f"{__package__}.{place}", group=SELECTORS.group)


@dataclass(frozen=True, kw_only=True)
class Installed:
    """Objects that other packages bring, by names that a flag takes beside ``built_in`` ones.

    ``group`` is that of their entry points; ``missing`` names what an object lacks.
    """

    flag: str
    group: str
    built_in: Collection[str]
    missing: Callable[[Any], list[str]]

    def names(self) -> tuple[str, ...]:
        """Names that the flag takes."""
        installed = {entry.name for entry in entry_points(group=self.group)}
        return (*self.built_in, *sorted(installed.difference(self.built_in)))

    def check_name(self, name: str) -> None:
        """Refuse an unknown name, without loading anything."""
        if name not in self.built_in and name not in self.names():
            raise ConfigError(
                f"{self.flag} {name}: must be one of {', '.join(self.names())} "
                f"(other packages add names by entry points of {self.group})"
            )

    def source_of(self, name: str) -> str:
        """Package and version of another package's object, on which ranks must agree, or ""."""
        found = () if name in self.built_in else self._named(name)
        return "; ".join(sorted(map(_described, found)))

    def load(self, name: str) -> Any:
        """The object of another package.

        Raises:
            ConfigError: there is none, or more than one, or it cannot be used.
        """
        self.check_name(name)
        found = self._named(name)
        if len(found) > 1:
            raise ConfigError(
                f"{self.flag} {name}: {len(found)} entry points of the group {self.group} have "
                f"this name ({self.source_of(name)}); uninstall all but one"
            )
        place = f"{self.flag} {name}: the entry point {_described(found[0])}"
        try:
            given = found[0].load()
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(f"{place} cannot be loaded: {why}; mend or uninstall it") from error
        is_class = isinstance(given, type)
        missing = ["an instance (it is a class)"] if is_class else self.missing(given)
        if missing:
            raise ConfigError(
                f"{place} gives {type(given).__name__} without {', '.join(missing)}; "
                "docs/EXTENDING.md says what it has"
            )
        return given

    def _named(self, name: str) -> tuple[EntryPoint, ...]:
        return tuple(entry_points(group=self.group, name=name))


def _missing_of_selector(selector: Any) -> list[str]:
    missing = _not_callable(selector, _METHODS)
    if not isinstance(getattr(selector, "by_token", None), bool):
        missing.append("by_token")
    work_model = getattr(selector, "work_model", None)
    return missing + [f"work_model.{name}" for name in _not_callable(work_model, _WORK_METHODS)]


def _not_callable(given: Any, methods: Collection[str]) -> list[str]:
    return [name for name in methods if not callable(getattr(given, name, None))]


def _described(entry: EntryPoint) -> str:
    origin = "" if entry.dist is None else f" of {entry.dist.name} {entry.dist.version}"
    return f"{entry.name} = {entry.value}{origin}"


SELECTORS = Installed(
    flag=FLAG,
    group="sparsebalance_megatron.selectors",
    built_in=BUILT_IN,
    missing=_missing_of_selector,
)
POLICIES = Installed(
    flag="--sparse-balance-tuning",
    group="sparsebalance_megatron.budget_policies",
    built_in=("off", "anchor", "raise"),
    missing=lambda policy: _not_callable(policy, ("allowed", "tuned_LS")),
)
