# SPDX-License-Identifier: Apache-2.0
"""Documents to Megatron's ``.bin`` and ``.idx`` files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sparsebalance_megatron.data.conversation import (
    Render,
    RenderedDocument,
    RenderError,
    render_conversation,
    render_plain,
    trained_tokens,
)
from sparsebalance_megatron.data.records import BadRecords, Record, Source
from sparsebalance_megatron.data.tokenizer import (
    DocumentTokenizer,
    load_tokenizer,
    train_bpe,
    transformers_files,
)
from sparsebalance_megatron.data.writer import DatasetWriter, check_output
from sparsebalance_megatron.errors import DataError, listed

_BATCH_DOCUMENTS = 256
_BATCH_CHARACTERS = 4_000_000
"""Limits of one encoding batch; bounds the memory that token offsets take."""

_TOKENIZER_SUFFIX = "_tokenizer"
_PERCENTILES = (50, 90, 99)


def prepare(
    source: Source,
    prefix: str,
    *,
    tokenizer_name: str | None = None,
    train_vocab_size: int | None = None,
    append_eod: bool = True,
    skip_bad_records: bool = False,
    overwrite: bool = False,
) -> dict[str, Any]:
    """Tokenise all documents of a source and write the data set; its summary.

    Exactly one of ``tokenizer_name`` and ``train_vocab_size`` is given.

    Raises:
        DataError: if input, tokenizer or output cannot be used; nothing is left behind then.
    """
    check_output(prefix, overwrite=overwrite, inputs=source.paths)
    if train_vocab_size is None:
        assert tokenizer_name is not None
        tokenizer = load_tokenizer(tokenizer_name)
    else:
        training_texts = _training_texts(source, BadRecords(skip=skip_bad_records))
        tokenizer = train_bpe(training_texts, train_vocab_size, prefix + _TOKENIZER_SUFFIX)
    if append_eod and tokenizer.eod is None:
        raise DataError(
            f"--tokenizer {tokenizer.name}: it has no end-of-sequence token; pass --no-append-eod"
        )
    bad = BadRecords(skip=skip_bad_records)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    with DatasetWriter(prefix, vocab_size=tokenizer.vocab_size, overwrite=overwrite) as writer:
        loss_tokens = 0
        records = _with_progress(source, bad, "tokenise")
        eod = tokenizer.eod if append_eod else None
        for tokens, mask in _encoded(records, tokenizer, eod, bad):
            writer.add(tokens, mask)
            loss_tokens += int(mask.sum())
        if not writer.lengths_tokens:
            raise DataError(
                f"{listed([str(path) for path in source.paths])}: no document to write; records "
                f"left out: {counts_text(bad.counts)}"
            )
        summary = _summary(writer, tokenizer, append_eod, bad, loss_tokens)
        texts = {".json": json.dumps(summary, indent=2) + "\n"}
        if train_vocab_size is not None:
            files = transformers_files(tokenizer)
            texts = {f"{_TOKENIZER_SUFFIX}/{name}": text for name, text in files.items()} | texts
        writer.commit(texts)
    return summary


def _with_progress(source: Source, bad: BadRecords, action: str) -> Iterator[Record]:
    from tqdm import tqdm

    bar_of = {"desc": action, "unit": "B", "unit_scale": True, "disable": None}
    with tqdm(total=source.total_bytes, **bar_of) as bar:
        for record in source.records(bad):
            yield record
            bar.update(record.size_bytes)


def _training_texts(source: Source, bad: BadRecords) -> Iterator[str]:
    for record in _with_progress(source, bad, "train tokenizer"):
        yield record.text or render_plain(record.messages or (), False)


def _rendered(
    records: Iterable[Record], render: Render, bad: BadRecords
) -> Iterator[tuple[Record, RenderedDocument]]:
    for record in records:
        if record.messages is None:
            yield record, RenderedDocument(text=record.text or "")
            continue
        try:
            yield record, render_conversation(record.messages, render)
        except RenderError as error:
            reason = "the chat template cannot render it"
            bad.found(record.place, reason, f"{reason} ({error})")


def _batches(
    documents: Iterable[tuple[Record, RenderedDocument]],
) -> Iterator[list[tuple[Record, RenderedDocument]]]:
    """Consecutive documents, bounded in number and characters."""
    batch: list[tuple[Record, RenderedDocument]] = []
    characters = 0
    for record, document in documents:
        batch.append((record, document))
        characters += len(document.text)
        if len(batch) == _BATCH_DOCUMENTS or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _encoded(
    records: Iterable[Record], tokenizer: DocumentTokenizer, eod: int | None, bad: BadRecords
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Token ids (int64) and loss mask (uint8) of every document; ``eod`` ends each, if given."""
    for batch in _batches(_rendered(records, tokenizer.render, bad)):
        encodings = tokenizer.encode(
            [document.text for _, document in batch],
            with_offsets=any(document.trained_spans is not None for _, document in batch),
        )
        for (record, document), encoding in zip(batch, encodings, strict=True):
            tokens = np.asarray(encoding.ids, dtype=np.int64)
            if not len(tokens):
                bad.found(record.place, "no tokens", "the tokenizer drops all of its text")
                continue
            if document.trained_spans is None:
                mask = np.ones(len(tokens), dtype=np.uint8)
            else:
                token_ends = [end for _, end in encoding.offsets]
                mask = trained_tokens(token_ends, document.trained_spans)
            if eod is not None:
                tokens = np.append(tokens, eod)
                mask = np.append(mask, np.uint8(document.ends_trained))
            yield tokens, mask


def _summary(
    writer: DatasetWriter,
    tokenizer: DocumentTokenizer,
    append_eod: bool,
    bad: BadRecords,
    loss_tokens: int,
) -> dict[str, Any]:
    lengths = np.asarray(writer.lengths_tokens)
    return {
        "documents": len(lengths),
        "tokens": int(lengths.sum()),
        "loss_tokens": loss_tokens,
        "loss_mask": writer.any_masked,
        "document_tokens": document_tokens(lengths),
        "skipped": dict(sorted(bad.counts.items())),
        "tokenizer": {"path": tokenizer.name, "vocab_size": tokenizer.vocab_size},
        "append_eod": append_eod,
    }


def document_tokens(lengths_tokens: np.ndarray) -> dict[str, int]:
    """Percentiles of documents' tokens, and the most."""
    percentiles = np.percentile(lengths_tokens, _PERCENTILES, method="nearest")
    named = zip(_PERCENTILES, percentiles, strict=True)
    return {f"p{rank}": int(value) for rank, value in named} | {"max": int(lengths_tokens.max())}


def counts_text(counts: Mapping[str, int]) -> str:
    """How many records were left out for each reason, in one line."""
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(counts.items())) or "none"
