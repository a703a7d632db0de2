# SPDX-License-Identifier: Apache-2.0
"""Packs as Megatron-Bridge documents them, back to documents that train on the same targets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from data.test_prepare import VOCABULARY, stored_documents, texts_source
from pyarrow import parquet

from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.packed_parquet import documents_in_packs
from sparsebalance_megatron.data.prepare import prepare
from sparsebalance_megatron.data.records import BadRecords, RecordFiles
from sparsebalance_megatron.errors import DataError

PADDING = 0


def packs_file(path: Path, rows: list[dict[str, list[int]]]) -> Path:
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    parquet.write_table(pyarrow.table(columns), path)
    return path


def packed(documents: list[tuple[np.ndarray, np.ndarray]], padding: int) -> dict[str, list[int]]:
    """A row of documents with their masks, each padded by some tokens."""
    row: dict[str, list[int]] = {"input_ids": [], "loss_mask": [], "seq_start_id": []}
    for tokens, mask in documents:
        row["seq_start_id"].append(len(row["input_ids"]))
        row["input_ids"] += [*tokens.tolist(), *[PADDING] * padding]
        row["loss_mask"] += [*mask[1:].tolist(), 0, *[0] * padding]
    return row


def random_documents(number: int) -> list[tuple[np.ndarray, np.ndarray]]:
    generator = np.random.default_rng(number)
    found = []
    for length in generator.integers(2, 40, number):
        mask = generator.integers(0, 2, length).astype(np.uint8)
        mask[0], mask[-1] = 0, 1
        found.append((generator.integers(1, 250, length), mask))
    return found


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("tokenizer")
    prefix = str(directory / "text")
    prepare(texts_source(directory), prefix, train_vocab_size=VOCABULARY)
    return f"{prefix}_tokenizer"


@pytest.mark.parametrize("padding", [0, 5])
def test_documents_and_masks_come_back(tmp_path: Path, tokenizer: str, padding: int) -> None:
    documents = random_documents(20)
    paths = [
        packs_file(tmp_path / "a.parquet", [packed(documents[:3], padding)]),
        packs_file(
            tmp_path / "b.idx.parquet",
            [packed(documents[3:4], padding), packed(documents[4:], padding)],
        ),
    ]
    prefix = str(tmp_path / "out")
    summary = prepare(RecordFiles(paths), prefix, tokenizer_name=tokenizer)
    for found, (tokens, _) in zip(stored_documents(prefix), documents, strict=True):
        assert found.tolist() == tokens.tolist()
    stored = Documents.open(prefix)
    for i, (tokens, mask) in enumerate(documents):
        found = stored.read_loss_mask(i, 0, len(tokens))
        assert found is not None and found.tolist() == mask.tolist()
    assert summary["loss_tokens"] == sum(int(mask.sum()) for _, mask in documents)
    assert summary["append_eod"] is False


GOOD = {"input_ids": [5, 6, 7, 8, 9], "loss_mask": [0, 1, 0, 1, 0], "seq_start_id": [0, 3]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mask": [0, 1, 0, 1]}, "5 tokens need a loss_mask"),
        ({"loss_mask": [0, 1, 0, 2, 0]}, "zeros and ones"),
        ({"input_ids": [], "loss_mask": []}, "0 tokens need"),
        ({"seq_start_id": []}, "must rise from 0"),
        ({"seq_start_id": [1, 3]}, "must rise from 0"),
        ({"seq_start_id": [0, 3, 3]}, "must rise from 0"),
        ({"seq_start_id": [0, 5]}, "must rise from 0"),
        ({"loss_mask": [0, 0, 1, 1, 0]}, "no trained token"),
        ({"input_ids": [5, 6, 7, 8, 300]}, "token 300 is not in the model's vocabulary"),
    ],
)
def test_rows_that_contradict_themselves_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    path = packs_file(tmp_path / "bad.parquet", [GOOD, GOOD | changes])
    with pytest.raises(DataError, match=message) as error:
        list(documents_in_packs(path, VOCABULARY, BadRecords(skip=False)))
    assert "row 2" in str(error.value)


def test_bad_rows_are_counted_and_left_out(tmp_path: Path) -> None:
    path = packs_file(tmp_path / "bad.parquet", [GOOD | {"seq_start_id": [0, 9]}, GOOD])
    bad = BadRecords(skip=True)
    found = list(documents_in_packs(path, VOCABULARY, bad))
    assert [tokens.tolist() for tokens, _ in found] == [[5, 6, 7], [8, 9]]
    assert [mask.tolist() for _, mask in found] == [[0, 0, 1], [0, 1]]
    assert bad.counts == {"no packed sequence": 1}


def test_packs_beside_texts_and_a_new_tokenizer_are_refused(tmp_path: Path) -> None:
    packs = packs_file(tmp_path / "packs.parquet", [GOOD])
    texts = texts_source(tmp_path).paths
    with pytest.raises(DataError, match="prepare them apart"):
        prepare(RecordFiles([*texts, packs]), str(tmp_path / "out"), train_vocab_size=VOCABULARY)
    with pytest.raises(DataError, match="--tokenizer that made them"):
        prepare(RecordFiles([packs]), str(tmp_path / "out"), train_vocab_size=VOCABULARY)
