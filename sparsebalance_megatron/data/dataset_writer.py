# SPDX-License-Identifier: Apache-2.0
"""Documents to Megatron's ``.bin`` and ``.idx`` files, which get their names when complete."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import numpy as np

from sparsebalance_megatron.data.documents import LOSS_MASK_SUFFIX, write_index
from sparsebalance_megatron.errors import DataError
from sparsebalance_megatron.json_file import refuse_output_over_input

_TOKEN_SUFFIXES = (".bin", ".idx")
_MASK_SUFFIXES = (f"{LOSS_MASK_SUFFIX}.bin", f"{LOSS_MASK_SUFFIX}.idx")
_SUMMARY_SUFFIX = ".json"
_SUFFIXES = (*_MASK_SUFFIXES, *_TOKEN_SUFFIXES, _SUMMARY_SUFFIX)
"""In the order in which files get their names."""
_LARGEST_UINT16_VOCABULARY = 65499
"""Megatron's preprocessing stores larger vocabularies as int32."""


class DatasetWriter:
    """Context manager that writes tokens and loss masks in Megatron's format.

    Nothing that looks like a data set exists before :meth:`commit`; leaving without it removes what
    was written. The loss mask is kept only if some token is masked. ``vocab_size`` decides the
    stored dtype, uint16 or int32, as Megatron's preprocessing does.
    """

    def __init__(self, prefix: str, *, vocab_size: int, overwrite: bool) -> None:
        check_output(prefix, overwrite=overwrite)
        self._prefix = prefix
        self.any_masked = False
        self.lengths_tokens: list[int] = []
        self._dtype = np.uint16 if vocab_size <= _LARGEST_UINT16_VOCABULARY else np.int32
        self._tokens = self._partial(".bin").open("wb")
        self._masks = self._partial(_MASK_SUFFIXES[0]).open("wb")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        for file in (self._tokens, self._masks):
            # Of a full disk: what is buffered has nowhere to go.
            with suppress(OSError):
                file.close()
        for suffix in _SUFFIXES:
            self._partial(suffix).unlink(missing_ok=True)

    def add(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Append a document: token ids, and per token whether predicting it counts (0 or 1)."""
        self._tokens.write(tokens.astype(self._dtype).tobytes())
        self._masks.write(mask.astype(np.uint8).tobytes())
        self.lengths_tokens.append(len(tokens))
        self.any_masked |= not mask.all()

    def commit(self, summary: str) -> None:
        """Finish the files and give them their names, replacing an older data set.

        The index, without which nothing reads a data set, gets its name after the data;
        ``PREFIX.json`` with the summary comes last.
        """
        self._tokens.close()
        self._masks.close()
        write_index(self._partial(".idx"), self.lengths_tokens, self._dtype)
        write_index(self._partial(_MASK_SUFFIXES[1]), self.lengths_tokens, np.uint8)
        self._partial(_SUMMARY_SUFFIX).write_text(summary, encoding="utf-8")
        for suffix in reversed(_SUFFIXES):
            Path(self._prefix + suffix).unlink(missing_ok=True)
        for suffix in _SUFFIXES if self.any_masked else (*_TOKEN_SUFFIXES, _SUMMARY_SUFFIX):
            self._partial(suffix).replace(self._prefix + suffix)

    def _partial(self, suffix: str) -> Path:
        return Path(f"{self._prefix}{suffix}.partial-{os.getpid()}")


def check_output(prefix: str, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Refuse a prefix that names no file, an input, or an existing data set that must stay."""
    if prefix.rpartition("/")[2] in ("", ".", ".."):
        raise DataError(f"--output-prefix '{prefix}': names no file; give a path such as out/train")
    outputs = [Path(prefix + suffix) for suffix in _SUFFIXES]
    for path in outputs:
        refuse_output_over_input(path, inputs, f"--output-prefix {prefix}:")
    existing = [str(path) for path in outputs if os.path.exists(path)]
    if existing and not overwrite:
        raise DataError(
            f"--output-prefix {prefix}: {', '.join(existing)} exists; choose another prefix or "
            "pass --overwrite"
        )
