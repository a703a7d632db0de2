# SPDX-License-Identifier: Apache-2.0
"""Reads from Megatron's flags for data which data sets a run mixes.

The rules are those of Megatron's ``get_blend_from_list`` and ``get_blend_and_blend_per_split``;
what these would misread or assert on is refused here in one line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import msgspec

from sparsebalance_megatron.data.data_set import Split
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.json_file import UnreadableFileError, read_json, read_text

_ALTERNATE = "give prefixes only, or a weight before every prefix, such as 0.7 web 0.3 books"


@dataclass(frozen=True, kw_only=True)
class Blend:
    """Data sets that are mixed, in the order given.

    ``place`` is the flag or file that names them, ``prefixes`` those of their ``.bin`` and ``.idx``
    files. ``weights`` are positive, in any unit; None mixes by size. ``whole``: every document
    counts, whatever ``--split`` says.
    """

    place: str
    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None = None
    whole: bool = False


def read_blends(flags: Any) -> Mapping[Split, Blend | None]:
    """The blend of every split, from ``flags`` as Megatron names them; None where there is none."""
    by_split = {
        "--train-data-path": flags.train_data_path,
        "--valid-data-path": flags.valid_data_path,
        "--test-data-path": flags.test_data_path,
    }
    kinds = by_split | {
        "--data-path": flags.data_path,
        "--data-args-path": flags.data_args_path,
        "--per-split-data-args-path": flags.per_split_data_args_path,
    }
    given = sorted(flag for flag, value in kinds.items() if value)
    if not given:
        raise DataError(
            "no --data-path: plans need the lengths of documents; give a prefix of "
            "files made by `sparse-balance prepare-data`"
        )
    if len(given) > 1 and not by_split.keys() >= set(given):
        raise DataError(f"{' and '.join(given)}: all of them name the data; give one of them")
    if flags.data_path:
        return dict.fromkeys(get_args(Split), parse_blend(flags.data_path, "--data-path"))
    if flags.data_args_path:
        place = f"--data-args-path {flags.data_args_path}"
        words = _read_words(flags.data_args_path, place)
        return dict.fromkeys(get_args(Split), parse_blend(words, place))
    if flags.per_split_data_args_path:
        return _read_per_split(flags.per_split_data_args_path)
    return {
        split: parse_blend(words, flag, whole=True) if words else None
        for split, (flag, words) in zip(get_args(Split), by_split.items(), strict=True)
    }


def parse_blend(words: Sequence[str], place: str, *, whole: bool = False) -> Blend:
    """Read prefixes, or weights and prefixes in turn, that were typed at ``place``."""
    words = [word.strip() for word in words]
    if not words:
        raise DataError(f"{place}: names no data set; {_ALTERNATE}")
    pairs = list(zip(words[::2], words[1::2], strict=False))
    numbers = [_number(weight) for weight, _ in pairs]
    if len(words) % 2 or all(number is None for number in numbers):
        _refuse_stray_weights(words, place)
        return Blend(place=place, prefixes=tuple(words), whole=whole)
    for (word, prefix), number in zip(pairs, numbers, strict=True):
        if number is None:
            raise DataError(f"{place}: the weight {word!r} of {prefix} is no number; {_ALTERNATE}")
        if not (math.isfinite(number) and number > 0):
            raise DataError(
                f"{place}: the weight {word} of {prefix} must be a number above 0; leave a data "
                "set out that is not to be used"
            )
    weights = tuple(number for number in numbers if number is not None)
    return Blend(
        place=place, prefixes=tuple(prefix for _, prefix in pairs), weights=weights, whole=whole
    )


def _refuse_stray_weights(words: Sequence[str], place: str) -> None:
    """A number among prefixes is a misplaced weight, unless a file has that name."""
    for word in words:
        if _number(word) is not None and not Path(f"{word}.idx").exists():
            raise DataError(
                f"{place}: {word} is no prefix, and not every prefix has a weight "
                f"before it; {_ALTERNATE}"
            )


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _read_words(path: str, place: str) -> list[str]:
    try:
        return read_text(Path(path)).split()
    except UnreadableFileError as error:
        raise DataError(f"{place}: {error}; list weights and prefixes in it") from error


_Words = list[str | float] | str | None


class _PerSplit(msgspec.Struct):
    """Weights and prefixes of every split; null or an empty list is none."""

    train: _Words
    valid: _Words
    test: _Words


def _read_per_split(path: str) -> dict[Split, Blend | None]:
    place = f"--per-split-data-args-path {path}"
    try:
        content = msgspec.structs.asdict(read_json(Path(path), _PerSplit))
    except UnreadableFileError as error:
        raise DataError(
            f"{place}: {error}; give a list of weights and prefixes for each of train, valid, test"
        ) from error
    blends: dict[Split, Blend | None] = {}
    for split in get_args(Split):
        words = content[split]
        words = words.split() if isinstance(words, str) else words
        blends[split] = (
            parse_blend([str(word) for word in words], f"{place}, {split}", whole=True)
            if words
            else None
        )
    return blends
