# SPDX-License-Identifier: Apache-2.0
"""Several data sets of one tokenizer into one, in order: the shards of one preparation, say."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.prepare import document_tokens
from sparsebalance_megatron.data.writer import DatasetWriter, check_output
from sparsebalance_megatron.json_file import UnreadableFileError, read_json

_SAME_TOKENIZER = "prepare all parts with the same --tokenizer and --append-eod"


def merge(prefixes: Sequence[str], prefix: str, *, overwrite: bool = False) -> dict[str, Any]:
    """Write the documents of all data sets, one data set after another; the summary of all.

    Tokens and masks of every part are checked against the tokenizer that its summary names. A part
    without a loss mask counts as one that trains on all tokens.

    Raises:
        DataError: if a part is missing or damaged, or the parts do not go together; nothing is left
            behind then.
    """
    inputs = [Path(f"{part}{suffix}") for part in prefixes for suffix in (".bin", ".idx", ".json")]
    check_output(prefix, overwrite=overwrite, inputs=inputs)
    summaries = [_summary_of(part) for part in prefixes]
    _require_alike(prefixes, summaries)
    vocab_size = int(summaries[0]["tokenizer"]["vocab_size"])
    parts = [Documents.open(part) for part in prefixes]
    for part in parts:
        part.check_values(vocab_size)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    loss_mask = any(part.loss_mask is not None for part in parts)
    with DatasetWriter(prefix, vocab_size=vocab_size, overwrite=overwrite) as writer:
        for part in parts:
            writer.add_dataset(part.prefix, part.loss_mask is not None)
        summary = _merged_summary(summaries, writer.lengths_tokens, loss_mask)
        writer.commit({".json": json.dumps(summary, indent=2) + "\n"})
    return summary


def _summary_of(prefix: str) -> dict[str, Any]:
    path = Path(f"{prefix}.json")
    try:
        summary = read_json(path)
    except UnreadableFileError as error:
        raise DataError(
            f"{path}: {error}; give data sets of `sparse-balance prepare-data`, which writes it"
        ) from error
    try:
        int(summary["tokenizer"]["vocab_size"]), str(summary["tokenizer"]["path"])
        int(summary["loss_tokens"]), bool(summary["append_eod"]), Counter(summary["skipped"])
    except (TypeError, KeyError, ValueError, IndexError) as error:
        raise DataError(
            f"{path}: no summary of `sparse-balance prepare-data` ({type(error).__name__}: "
            f"{error}); prepare this part again"
        ) from error
    result: dict[str, Any] = summary
    return result


def _require_alike(prefixes: Sequence[str], summaries: Sequence[dict[str, Any]]) -> None:
    first = summaries[0]
    for prefix, summary in zip(prefixes, summaries, strict=True):
        for what, one, other in (
            *(
                (f"tokenizer {key}", first["tokenizer"][key], summary["tokenizer"][key])
                for key in ("path", "vocab_size")
            ),
            ("append_eod", first["append_eod"], summary["append_eod"]),
        ):
            if one != other:
                raise DataError(
                    f"{prefix}.json: {what} is {other}, of {prefixes[0]} {one}; {_SAME_TOKENIZER}"
                )


def _merged_summary(
    summaries: Sequence[dict[str, Any]], lengths_tokens: np.ndarray, loss_mask: bool
) -> dict[str, Any]:
    skipped: Counter[str] = Counter()
    for summary in summaries:
        skipped.update(summary["skipped"])
    return {
        "documents": len(lengths_tokens),
        "tokens": int(lengths_tokens.sum()),
        "loss_tokens": sum(summary["loss_tokens"] for summary in summaries),
        "loss_mask": loss_mask,
        "document_tokens": document_tokens(lengths_tokens),
        "skipped": dict(sorted(skipped.items())),
        "tokenizer": summaries[0]["tokenizer"],
        "append_eod": summaries[0]["append_eod"],
    }
