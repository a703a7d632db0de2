# SPDX-License-Identifier: Apache-2.0
"""Errors that name what a user can change."""

import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

_NAMES_SHOWN = 5
_PREFIX = "--sparse-balance-"


class ConfigError(ValueError):
    """A flag has a wrong value, or two flags do not work together."""


class ConvertError(ValueError):
    """A checkpoint or its config.json cannot be converted; the text names it and the remedy."""


class DataError(ValueError):
    """A data file or record is missing, damaged or unusable; the text names it and the remedy."""


def place_and_reason(error: BaseException) -> tuple[str, str]:
    """The file and line that raised an error, if any, and the first line of its text, or source."""
    frames = traceback.extract_tb(error.__traceback__)
    text = str(error).strip().partition("\n")[0]
    if not frames:
        return "", text
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}", text or frames[-1].line or ""


@contextmanager
def one_line_refusals() -> Iterator[None]:
    """Turn what Megatron, or a tokenizer, raises at wrong flags into one :class:`ConfigError`."""
    try:
        yield
    except Exception as error:
        if type(error).__module__.startswith("sparsebalance_megatron"):
            raise
        place, reason = place_and_reason(error)
        raise ConfigError(f"Megatron refuses the flags ({place}): {reason}") from error


def listed(names: Iterable[str]) -> str:
    """A name alone, or a count and the first names, for error messages."""
    found = sorted(names)
    if len(found) == 1:
        return found[0]
    more = f" and {len(found) - _NAMES_SHOWN} more" if len(found) > _NAMES_SHOWN else ""
    return f"{len(found)} ({', '.join(found[:_NAMES_SHOWN])}{more})"


class PlanError(ValueError):
    """No plan exists, or a plan breaks one of its invariants."""


def nearest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean NAME?" of a misspelt name, else nothing."""
    by_end = {name.removeprefix(_PREFIX): name for name in known}
    found = get_close_matches(word.removeprefix(_PREFIX), by_end, 1, cutoff=0.75)
    return f"; did you mean {by_end[found[0]]}?" if found else ""


def with_nearest(message: str, known: Iterable[str]) -> str:
    """An error of argparse, with the flag that an unknown one may stand for."""
    unknown = message.partition("unrecognized arguments: ")[2].split()
    flag = next((word for word in unknown if word.startswith("--")), "")
    return message + nearest(flag.partition("=")[0], known)
