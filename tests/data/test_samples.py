# SPDX-License-Identifier: Apache-2.0
"""Stored documents and the sample index against token-by-token construction."""

import os
import re
import resource
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from data.stored_documents import open_stored, write_stored
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import data as oracle

from sparsebalance_megatron.data.data_set import epoch_permutation, split_range
from sparsebalance_megatron.data.documents import Documents, StoredValues, check_loss_mask
from sparsebalance_megatron.data.packing import Sample, packed_cu_seqlens
from sparsebalance_megatron.data.samples import Blend, SampleIndex, open_samples
from sparsebalance_megatron.errors import DataError

OVERLONG = ("split", "truncate", "drop")

document_lengths = st.lists(st.integers(0, 23), min_size=1, max_size=12)


def distinct_documents(lengths: list[int]) -> list[list[int]]:
    """Documents in which no token occurs twice, so that every pair says where it comes from."""
    ends = np.cumsum(lengths)
    return [
        list(range(int(end) - length, int(end))) for end, length in zip(ends, lengths, strict=True)
    ]


def pairs_of(sample: Sample) -> list[oracle.Pair]:
    return list(pairwise(sample.tokens.tolist()))


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    """7 samples of one epoch."""
    documents = distinct_documents([9, 3, 20, 2, 5])
    return open_stored(
        write_stored(tmp_path_factory.mktemp("index") / "data", documents), max_tokens=8
    )


@given(
    lengths=document_lengths,
    max_tokens=st.integers(1, 9),
    overlong=st.sampled_from(OVERLONG),
    sequences=st.integers(0, 3),
    weights=st.sampled_from(["100,0,0", "6,3,1"]),
    split=st.sampled_from(["train", "valid", "test"]),
)
@settings(max_examples=60, deadline=None)
def test_samples_equal_naive_construction(
    lengths: list[int],
    max_tokens: int,
    overlong: str,
    sequences: int,
    weights: str,
    split: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    everything_stored = distinct_documents(lengths)
    prefix = tmp_path_factory.mktemp("samples") / "data"
    write_stored(prefix, everything_stored, sequences_per_document=sequences)
    documents = everything_stored[slice(*split_range(len(lengths), weights, split))]
    per_document = [oracle.samples(document, max_tokens, overlong) for document in documents]
    expected = list(chain.from_iterable(per_document))
    blend = Blend(place="--data-path", prefixes=(str(prefix),))
    options = {"max_tokens": max_tokens, "overlong": overlong, "seed": 1}
    try:
        built = open_samples(blend, split, split_weights=weights, **options)
    except DataError as error:
        assert not expected
        assert re.search("no sample left|holds no token|the data set is empty", str(error))
        return
    if built is None:
        assert not documents
        return
    everything = np.arange(len(built))
    assert [pairs_of(built.read(i)) for i in everything] == expected
    assert built.lengths_of(everything).tolist() == [len(sample) for sample in expected]
    counts = built.counts
    kept = sum(bool(pieces) for pieces in per_document)
    assert counts.documents == len(documents)
    assert counts.samples == len(built) == len(expected)
    assert counts.tokens == sum(map(len, expected))
    assert counts.dropped_documents == len(documents) - kept
    assert counts.dropped_tokens == sum(
        len(document)
        for document, pieces in zip(documents, per_document, strict=True)
        if not pieces
    )
    assert counts.split_documents == sum(len(pieces) > 1 for pieces in per_document)
    stored = sum(map(len, documents))
    assert stored == counts.tokens + kept + counts.truncated_tokens + counts.dropped_tokens
    assert all(isinstance(value, int) for value in vars(counts).values())


def test_order_is_frozen() -> None:
    """A change here would reorder the data of every run that is resumed."""
    assert sorted(epoch_permutation(50, 7, 3).tolist()) == list(range(50))
    assert epoch_permutation(8, 1234, 0).tolist() == [1, 6, 2, 0, 3, 5, 7, 4]
    assert epoch_permutation(8, 1234, 1).tolist() == [3, 6, 7, 0, 5, 4, 1, 2]


@given(first=st.integers(0, 90), size=st.integers(1, 40))
@settings(max_examples=40)
def test_batches_are_cut_from_one_epoch_after_another(
    first: int, size: int, index: SampleIndex
) -> None:
    """Whatever was asked for before, as in a run that is resumed."""
    epochs = [epoch_permutation(len(index), 1, epoch) for epoch in range(20)]
    expected = np.concatenate(epochs)[first : first + size]
    assert np.array_equal(index.global_batch(first, size), expected)


@pytest.mark.parametrize("weights", ["99,1,0", "969,30,1", "1", "0,1,1", "50,50", ".5,.25,.25"])
def test_split_equals_megatrons(weights: str) -> None:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    matrix = convert_split_vector_to_split_matrix(parse_and_normalize_split(weights))
    for documents in range(1, 400):
        ranges = [split_range(documents, weights, name) for name in ("train", "valid", "test")]
        for bookends, ours in zip(matrix, ranges, strict=True):
            if bookends is None:
                assert ours[0] == ours[1]
            else:
                assert ours == tuple(round(bookend * float(documents)) for bookend in bookends)


@pytest.mark.parametrize("weights", ["", "a,b", "1,2,3,4", "-1,1", "0,0,0", "1;2"])
def test_bad_split_weights_are_named(weights: str) -> None:
    with pytest.raises(DataError, match=r"--split .*such as 99,1,0"):
        split_range(10, weights, "train")


def test_digest_tells_data_and_options_apart(tmp_path: Path) -> None:
    prefix = write_stored(tmp_path / "data", distinct_documents([5, 9, 30]))
    other = write_stored(tmp_path / "other", distinct_documents([9, 5, 30]))
    digests = {
        open_stored(prefix).digest(),
        open_stored(other).digest(),
        open_stored(prefix, max_tokens=9).digest(),
        open_stored(prefix, overlong="truncate").digest(),
    }
    assert len(digests) == 4
    assert open_stored(prefix).digest() in digests


def test_samples_out_of_range_are_refused(index: SampleIndex) -> None:
    for sample in (-1, len(index)):
        with pytest.raises(IndexError):
            index.read(sample)
    with pytest.raises(ValueError, match="batch of 0 samples"):
        index.global_batch(0, 0)
    with pytest.raises(ValueError, match="at least 1 token"):
        packed_cu_seqlens([])


SMALL = 200_000
"""Values of files that are looked at whole."""


def test_places_of_a_large_file_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its ends among them. That a large mask holds a 1 somewhere cannot be said."""
    monkeypatch.setattr("sparsebalance_megatron.data.documents._PLACES", 4)
    monkeypatch.setattr("sparsebalance_megatron.data.documents._PLACE_BYTES", 1000)
    mask = np.zeros(SMALL, dtype=np.uint8)
    mask[5000:6000] = 3  # between two places
    stored = StoredValues(tmp_path / "mask.bin", mask.dtype, SMALL)
    mask.tofile(stored.path)
    check_loss_mask(stored)
    for place in (0, 999, SMALL - 1000, SMALL - 1):
        wrong = mask.copy()
        wrong[place] = 2
        wrong.tofile(stored.path)
        with pytest.raises(DataError, match="holds 2"):
            check_loss_mask(stored)


def test_more_data_sets_than_files_may_be_open(tmp_path: Path) -> None:
    written = [write_stored(tmp_path / str(i), [[i, i + 1]]) for i in range(20)]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 5
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        opened = [Documents.open(prefix) for prefix in written]
        found = [each.tokens[0:2].tolist() for each in opened]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert found == [[i, i + 1] for i in range(20)]


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    prefix = write_stored(tmp_path / "data", [[1, 2, 3, 4]])
    opened = Documents.open(prefix)
    Path(f"{prefix}.bin").write_bytes(bytes(8))
    assert opened.tokens[0:2].tolist() == [0, 0]
    with pytest.raises(DataError, match=f"{prefix}.bin: cut short since it was opened"):
        opened.tokens[1:4]
