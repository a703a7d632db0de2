# SPDX-License-Identifier: Apache-2.0
"""What a JSON file holds, without its values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def keys(value: Any) -> Any:
    """The shape of a JSON value: keys all the way down, of lists those of the first entry."""
    if isinstance(value, dict):
        return {key: keys(each) for key, each in value.items()}
    if isinstance(value, list):
        return [keys(value[0])] if value and isinstance(value[0], dict | list) else []
    return None


def numbers(value: Any) -> Iterator[float]:
    """Every number in it."""
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from numbers(each)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield value
