# SPDX-License-Identifier: Apache-2.0
"""Parts of files follow one another and are all there is, wherever their borders fall."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.records import BadRecords, RecordFiles
from sparsebalance_megatron.data.shard import Shard


@given(
    lengths=st.lists(st.lists(st.integers(1, 30), max_size=6), min_size=1, max_size=4),
    count=st.integers(1, 9),
    ends_with_newline=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_the_records_of_all_parts_are_those_of_one_run(
    lengths: list[list[int]],
    count: int,
    ends_with_newline: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("shards")
    paths, texts = [], []
    for number, of_file in enumerate(lengths):
        lines = [f'{{"text": "{len(texts) + i}{"x" * n}"}}' for i, n in enumerate(of_file)]
        texts += [line[10:-2] for line in lines]
        paths.append(folder / f"{number}.jsonl")
        end = "\n" if lines and ends_with_newline else ""
        paths[-1].write_text("\n".join(lines) + end)
    parts = [
        RecordFiles(paths, Shard(number=number, count=count)) for number in range(1, count + 1)
    ]
    read = [record.text for part in parts for record in part.records(BadRecords(skip=False))]
    assert read == texts
    assert sum(part.total_bytes for part in parts) == RecordFiles(paths).total_bytes


def test_a_record_in_the_middle_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text('{"text": "first"}\n' * 3 + '{"text": 7}\n')
    part = RecordFiles([path], Shard(number=2, count=2))
    with pytest.raises(DataError, match=rf"{path}, line at byte 54: text is not a string"):
        list(part.records(BadRecords(skip=False)))


@pytest.mark.parametrize("text", ["", "1", "0/4", "5/4", "1/0", "-1/4", "1/4/2", "a/b", "1 / 4"])
def test_what_is_no_part_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"--shard .*: must be a part of parts"):
        Shard.parse(text)
    assert Shard.parse("2/8") == Shard(number=2, count=8)
