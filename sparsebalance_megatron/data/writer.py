# SPDX-License-Identifier: Apache-2.0
"""Writes a data set under temporary names; it gets its real names when it is complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from sparsebalance_megatron.data.documents import LOSS_MASK_SUFFIX
from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.megatron.datasets import dataset_builder, token_dtype

_TOKEN_SUFFIXES = (".bin", ".idx")
_MASK_SUFFIXES = (f"{LOSS_MASK_SUFFIX}.bin", f"{LOSS_MASK_SUFFIX}.idx")


class DatasetWriter:
    """Context manager around Megatron's ``IndexedDatasetBuilder``, for tokens and loss masks.

    Nothing that looks like a data set exists before :meth:`commit`; leaving without it removes what
    was written. The loss mask is kept only if some token is masked.

    Args:
        prefix: the data set becomes ``prefix.bin`` and ``prefix.idx``.
        vocab_size: decides the stored dtype, uint16 or int32, as Megatron's preprocessing does.
        overwrite: replace a data set of that name.

    Attributes:
        any_masked: whether some token does not count for the loss.

    Raises:
        DataError: if there is a data set of that name and ``overwrite`` is off.
    """

    def __init__(self, prefix: str, *, vocab_size: int, overwrite: bool) -> None:
        check_output(prefix, overwrite=overwrite)
        self._prefix = prefix
        self.any_masked = False
        self._texts: Mapping[str, str] = {}
        self._tokens = dataset_builder(self._partial(".bin"), token_dtype(vocab_size))
        self._masks = dataset_builder(self._partial(f"{LOSS_MASK_SUFFIX}.bin"), np.uint8)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        for builder in (self._tokens, self._masks):
            builder.data_file.close()
        for suffix in (*_TOKEN_SUFFIXES, *_MASK_SUFFIXES, *self._texts):
            Path(self._partial(suffix)).unlink(missing_ok=True)

    @property
    def lengths_tokens(self) -> np.ndarray:
        """Tokens of every document so far."""
        return np.asarray(self._tokens.sequence_lengths, dtype=np.int64)

    def add(self, tokens: np.ndarray, mask: np.ndarray) -> None:
        """Append a document: token ids, and per token whether predicting it counts (0 or 1)."""
        self._tokens.add_document(tokens, [len(tokens)])
        self._masks.add_document(mask, [len(mask)])
        self.any_masked |= not mask.all()

    def commit(self, texts: Mapping[str, str]) -> None:
        """Finish the files and give them their names, replacing an older data set.

        The index, without which nothing reads a data set, gets its name after the data; the last
        of ``texts`` comes last of all.

        Args:
            texts: contents of further files by suffix, such as ``.json``.
        """
        self._texts = dict(texts)
        self._tokens.finalize(self._partial(".idx"))
        self._masks.finalize(self._partial(f"{LOSS_MASK_SUFFIX}.idx"))
        for suffix, text in texts.items():
            path = Path(self._partial(suffix))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        for suffix in reversed((*_MASK_SUFFIXES, *_TOKEN_SUFFIXES, *texts)):
            Path(self._prefix + suffix).unlink(missing_ok=True)
        masks = _MASK_SUFFIXES if self.any_masked else ()
        for suffix in (*masks, *_TOKEN_SUFFIXES, *texts):
            Path(self._partial(suffix)).replace(self._prefix + suffix)

    def _partial(self, suffix: str) -> str:
        return f"{self._prefix}{suffix}.partial"


def check_output(prefix: str, *, overwrite: bool, inputs: Sequence[Path] = ()) -> None:
    """Whether a data set of that name may be written.

    Raises:
        DataError: if it would replace an input, or an existing one that may not be replaced.
    """
    outputs = [Path(prefix + suffix) for suffix in (*_TOKEN_SUFFIXES, ".json")]
    read = {path.resolve() for path in inputs}
    for path in outputs:
        if path.resolve() in read:
            raise DataError(
                f"--output-prefix {prefix}: would replace the input {path}; choose another"
            )
    existing = [str(path) for path in outputs if path.exists()]
    if existing and not overwrite:
        raise DataError(
            f"--output-prefix {prefix}: {', '.join(existing)} exists; choose another prefix or "
            "pass --overwrite"
        )
