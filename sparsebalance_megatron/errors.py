# SPDX-License-Identifier: Apache-2.0
"""Errors that name what a user can change."""

from __future__ import annotations

from collections.abc import Collection

_NAMES_SHOWN = 5


class ConfigError(ValueError):
    """A flag has a wrong value, or two flags do not work together."""


class ConvertError(ValueError):
    """A checkpoint or its config.json cannot be converted; the text names it and the remedy."""


class DataError(ValueError):
    """A data file or record is missing, damaged or unusable; the text names it and the remedy."""


def listed(names: Collection[str]) -> str:
    """A count and the first names, for error messages."""
    shown = sorted(names)[:_NAMES_SHOWN]
    more = f" and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
    return f"{len(names)} ({', '.join(shown)}{more})"
