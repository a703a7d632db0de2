# SPDX-License-Identifier: Apache-2.0
"""Shards, merged, are byte for byte what one run writes; parts that do not fit are named."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sparsebalance_megatron.cli import main
from sparsebalance_megatron.data.documents import Documents
from sparsebalance_megatron.data.errors import DataError
from sparsebalance_megatron.data.merge import merge
from sparsebalance_megatron.data.prepare import prepare
from sparsebalance_megatron.data.records import RecordFiles

VOCABULARY = 270
TALK = [{"role": "user", "content": "How?"}, {"role": "assistant", "content": "So."}]
RECORDS = [{"text": f"document {i} " * (1 + i % 5)} for i in range(9)]
RECORDS += [{"messages": TALK}, {"text": ""}, {"text": "the last one"}]
"""Of three parts the first two have no conversation, so no mask."""
SUFFIXES = (".bin", ".idx", "_loss_mask.bin", "_loss_mask.idx", ".json")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run, and three shards, with its tokenizer."""
    folder = tmp_path_factory.mktemp("merge")
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    prepare(
        RecordFiles([path]),
        str(folder / "base"),
        train_vocab_size=VOCABULARY,
        skip_bad_records=True,
    )
    common = ["prepare-data", "--input", str(path), "--on-bad-record", "skip"]
    common += ["--tokenizer", str(folder / "base_tokenizer"), "--output-prefix"]
    assert main([*common, str(folder / "whole")]) == 0
    for number in (1, 2, 3):
        assert main([*common, str(folder / f"part{number}"), "--shard", f"{number}/3"]) == 0
    return folder


def parts(folder: Path) -> list[str]:
    return [str(folder / f"part{number}") for number in (1, 2, 3)]


def test_merged_shards_are_what_one_run_writes(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    merged = str(folder / "merged")
    assert main(["merge-data", "--input", *parts(folder), "--output-prefix", merged]) == 0
    assert f"wrote {merged}.bin and .idx: 11 documents" in capsys.readouterr().out
    assert [Path(f"{part}_loss_mask.idx").exists() for part in parts(folder)] == [0, 0, 1]
    for suffix in SUFFIXES:
        written = Path(f"{folder / 'whole'}{suffix}").read_bytes()
        assert Path(f"{merged}{suffix}").read_bytes() == written, suffix


def test_throughput_is_stated(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["prepare-data", "--input", str(folder / "in.jsonl"), "--on-bad-record", "skip"]
    again += ["--tokenizer", str(folder / "base_tokenizer"), "--output-prefix"]
    assert main([*again, str(folder / "again")]) == 0
    assert "MB of input and" in capsys.readouterr().out.splitlines()[-1]


def copied(folder: Path, part: str, target: Path) -> Path:
    for suffix in (".bin", ".idx", ".json"):
        (target / f"{part}{suffix}").write_bytes((folder / f"{part}{suffix}").read_bytes())
    return target / part


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("tokenizer", {"path": "other", "vocab_size": VOCABULARY}, "tokenizer path is other"),
        ("append_eod", False, "append_eod is False"),
        ("skipped", 7, r"part1\.json: no summary"),
        ("tokenizer", {"path": "x"}, r"part1\.json: no summary"),
    ],
)
def test_parts_that_do_not_go_together_are_named(
    folder: Path, tmp_path: Path, key: str, value: object, named: str
) -> None:
    other = copied(folder, "part1", tmp_path)
    summary = json.loads(Path(f"{other}.json").read_text())
    Path(f"{other}.json").write_text(json.dumps(summary | {key: value}))
    with pytest.raises(DataError, match=named):
        merge([str(folder / "part2"), str(other)], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out*"))


def test_tokens_and_masks_of_parts_are_checked(folder: Path, tmp_path: Path) -> None:
    other = copied(folder, "part1", tmp_path)
    stored = np.fromfile(f"{other}.bin", dtype=np.uint16)
    stored[5] = VOCABULARY
    stored.tofile(f"{other}.bin")
    with pytest.raises(DataError, match=rf"part1\.bin: token {VOCABULARY} is not in the model"):
        merge([str(other), str(folder / "part2")], str(tmp_path / "out"))
    third = copied(folder, "part3", tmp_path)
    for suffix in ("_loss_mask.bin", "_loss_mask.idx"):
        Path(f"{third}{suffix}").write_bytes((folder / f"part3{suffix}").read_bytes())
    mask = np.fromfile(f"{third}_loss_mask.bin", dtype=np.uint8)
    mask[0] = 9
    mask.tofile(f"{third}_loss_mask.bin")
    with pytest.raises(DataError, match="holds 9, not a loss mask of 0 and 1"):
        merge([str(folder / "part2"), str(third)], str(tmp_path / "out"))


def test_a_part_without_summary_or_files_is_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"absent\.json: cannot be read"):
        merge([str(folder / "part1"), str(tmp_path / "absent")], str(tmp_path / "out"))
    other = copied(folder, "part1", tmp_path)
    Path(f"{other}.idx").unlink()
    with pytest.raises(DataError, match=r"part1\.idx: no such file"):
        merge([str(other)], str(tmp_path / "out"))
    with pytest.raises(DataError, match="would replace the input"):
        merge([str(folder / "part1")], str(folder / "part1"), overwrite=True)


def test_one_part_alone_is_checked_and_copied(folder: Path, tmp_path: Path) -> None:
    merge([str(folder / "part3")], str(tmp_path / "out"))
    assert len(Documents.open(tmp_path / "out")) == len(Documents.open(folder / "part3"))


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--shard", "4/3", "--tokenizer", "t"), "--shard 4/3: must be a part"),
        (("--shard", "1/3", "--tokenizer-train", "300"), "train it once and give --tokenizer"),
    ],
)
def test_wrong_shards_are_one_line(
    folder: Path, flags: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["prepare-data", "--input", str(folder / "in.jsonl"), "--output-prefix"]
    assert main([*common, str(folder / "never"), *flags]) == 2
    assert named in capsys.readouterr().err
    assert not list(folder.glob("never*"))
