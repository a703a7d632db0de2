# SPDX-License-Identifier: Apache-2.0
"""Packed sequences of Megatron-Bridge in Parquet, taken apart into documents again.

A row holds ``input_ids``, where each sequence in them begins (``seq_start_id``), and a loss mask
that counts the prediction of the *next* token: Megatron-Bridge, "Packed Parquet storage",
``write_packed_parquet``. Masks of this project count the prediction of the token itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.data.documents import check_tokens
from sparsebalance_megatron.data.records import BadRecords, parquet_columns, parquet_rows

COLUMNS = ("input_ids", "loss_mask", "seq_start_id")


def holds_packs(path: Path) -> bool:
    """Whether a file is Parquet with the columns of packed sequences."""
    return path.suffix == ".parquet" and {*COLUMNS} <= {*parquet_columns(path)}


def documents_in_packs(
    path: Path, vocab_size: int, bad: BadRecords
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids (int64) and loss mask (uint8) of every sequence, without what follows its last
    trained token: padding, which no loss sees.

    Example:
        A row of ``input_ids`` [5, 6, 7, 8, 9], ``loss_mask`` [0, 1, 0, 1, 0] and ``seq_start_id``
        [0, 3] is the documents [5, 6, 7] and [8, 9], trained on 7 and on 9.

    Raises:
        DataError: a row contradicts itself, or a token is not in the vocabulary.
    """
    for place, row, _ in parquet_rows(path, COLUMNS):
        tokens_T, trains_next_T, begin_S = (np.asarray(row[name]) for name in COLUMNS)
        if explanation := _contradiction(row, begin_S):
            bad.found(place, "no packed sequence", explanation)
            continue
        check_tokens(tokens_T, vocab_size, place)
        for tokens, trains_next in zip(
            np.split(tokens_T, begin_S[1:]), np.split(trains_next_T, begin_S[1:]), strict=True
        ):
            last = int(np.flatnonzero(trains_next[:-1]).max(initial=-1)) + 1
            if last == 0:
                bad.found(place, "no trained token", "a sequence has no trained token")
                continue
            mask = np.concatenate([[0], trains_next[:last]])
            yield tokens[: last + 1].astype(np.int64), mask.astype(np.uint8)


def _contradiction(row: dict[str, Any], begin_S: np.ndarray) -> str | None:
    tokens, mask = len(row["input_ids"]), row["loss_mask"]
    if not tokens or len(mask) != tokens or not {*mask} <= {0, 1}:
        return f"{tokens} tokens need a loss_mask of as many zeros and ones"
    if not len(begin_S) or begin_S[0] != 0 or (np.diff(begin_S, append=tokens) < 1).any():
        return f"seq_start_id must rise from 0 to below {tokens}, the number of tokens"
    return None
