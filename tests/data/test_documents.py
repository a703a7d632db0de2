# SPDX-License-Identifier: Apache-2.0
"""Stored tokens and masks: all of a small file is looked at, and places of a large one; how many
files may be open."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from data.conftest import WriteDataset

from sparsebalance_megatron.data import documents
from sparsebalance_megatron.data.documents import Documents, check_loss_mask, check_token_ids
from sparsebalance_megatron.errors import DataError

VOCABULARY = 100
SMALL = 200_000
"""Values of files that are looked at whole."""


@pytest.mark.parametrize("place", [0, 777, SMALL - 1])
def test_every_value_of_a_small_file_is_looked_at(place: int) -> None:
    tokens = np.full(SMALL, VOCABULARY - 1, dtype=np.uint16)
    check_token_ids("data", tokens, VOCABULARY)
    tokens[place] = VOCABULARY
    with pytest.raises(DataError, match=rf"data.bin: token {VOCABULARY} .* of {VOCABULARY}"):
        check_token_ids("data", tokens, VOCABULARY)
    mask = np.zeros(SMALL, dtype=np.uint8)
    with pytest.raises(DataError, match=r"mask.bin: all zero"):
        check_loss_mask(mask, "mask.bin")
    mask[place] = 1
    check_loss_mask(mask, "mask.bin")
    mask[place] = 2
    with pytest.raises(DataError, match=r"mask.bin: holds 2"):
        check_loss_mask(mask, "mask.bin")


def test_places_of_a_large_file_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its ends among them. That a large mask holds a 1 somewhere cannot be said."""
    monkeypatch.setattr(documents, "_PLACES", 4)
    monkeypatch.setattr(documents, "_PLACE_BYTES", 1000)
    mask = np.zeros(SMALL, dtype=np.uint8)
    mask[5000:6000] = 3  # between two places
    check_loss_mask(mask, "mask.bin")
    for place in (0, 999, SMALL - 1000, SMALL - 1):
        wrong = mask.copy()
        wrong[place] = 2
        with pytest.raises(DataError, match="holds 2"):
            check_loss_mask(wrong, "mask.bin")


@contextmanager
def few_open_files(more: int) -> Iterator[int]:
    """Inside, this process may open as many more files; the limit is given."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = max(map(int, os.listdir("/proc/self/fd"))) + 1 + more
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield limit
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_more_data_sets_than_files_may_be_open(tmp_path: Path, write_dataset: WriteDataset) -> None:
    written = [write_dataset(tmp_path / str(i), [[i, i + 1]]) for i in range(20)]
    with few_open_files(4):
        opened = [Documents.open(prefix) for prefix in written]
        found = [each.read_tokens(0, 0, 2).tolist() for each in opened]
    assert found == [[i, i + 1] for i in range(20)]


def test_the_limit_of_open_files_is_named(tmp_path: Path, write_dataset: WriteDataset) -> None:
    prefix = write_dataset(tmp_path / "data", [[1, 2]])
    with few_open_files(0) as limit, ExitStack() as opened, pytest.raises(DataError) as error:
        with suppress(OSError):
            while True:
                opened.enter_context(open(os.devnull))
        Documents.open(prefix)
    assert str(error.value) == (
        f"{prefix}.idx: too many open files: this process may open {limit}; raise the limit with "
        "ulimit -n"
    )


def test_a_file_that_is_cut_while_it_is_read_is_named(
    tmp_path: Path, write_dataset: WriteDataset
) -> None:
    prefix = write_dataset(tmp_path / "data", [[1, 2, 3, 4]])
    opened = Documents.open(prefix)
    Path(f"{prefix}.bin").write_bytes(bytes(8))
    assert opened.read_tokens(0, 0, 2).tolist() == [0, 0]
    with pytest.raises(DataError, match=f"{prefix}.bin: cut short since it was opened"):
        opened.read_tokens(0, 1, 3)
