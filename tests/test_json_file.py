# SPDX-License-Identifier: Apache-2.0
"""Files that users name are opened, or refused in no time, whatever they are."""

import io
import os
from pathlib import Path

import pytest

from sparsebalance_megatron.data.records import RecordFiles
from sparsebalance_megatron.errors import ConfigError, DataError
from sparsebalance_megatron.json_file import (
    UnreadableFileError,
    bounded_lines,
    open_regular,
    refuse_same_file,
)


@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "/dev/null", "folder", "loop", "a\0b", "no"])
def test_what_is_no_regular_file_is_refused_at_once(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UnreadableFileError, match="cannot be read"):
        open_regular(tmp_path / name)
    with pytest.raises(DataError, match="cannot be read"):
        RecordFiles([tmp_path / name])


def test_lines_are_cut_where_they_are_too_long() -> None:
    stream = io.BufferedReader(io.BytesIO(b"ab\nabcdefghij\n\nabc\nabcd"))
    assert list(bounded_lines(stream, 4)) == [b"ab\n", b"abcd", b"\n", b"abc\n", b"abcd"]


def test_an_output_that_is_an_input_is_refused_under_any_name(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("kept")
    (tmp_path / "link").symlink_to("log")
    os.link(tmp_path / "log", tmp_path / "hard")
    for name in ("log", "link", "hard", "../" + tmp_path.name + "/log"):
        with pytest.raises(ConfigError, match=r"-o .*: would replace .*log"):
            refuse_same_file(tmp_path / name, [tmp_path / "log"], "-o")
    refuse_same_file(tmp_path / "other", [tmp_path / "log", tmp_path / "gone"], "-o")
