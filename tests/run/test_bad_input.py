# SPDX-License-Identifier: Apache-2.0
"""Bad input ends every rank with one clear line, before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import train

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def damaged(documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an index file cut short, and a cost table that is no table."""
    directory = tmp_path_factory.mktemp("damaged")
    (directory / "train.bin").write_bytes(documents.with_suffix(".bin").read_bytes())
    (directory / "train.idx").write_bytes(documents.with_suffix(".idx").read_bytes()[:-9])
    (directory / "costs.json").write_text('{"format_version": 1, "rows": [')
    return directory


CASES = {
    "block size 0": (("--sparse-balance-block-size", "0"), "--sparse-balance-block-size 0"),
    "missing data": (("--data-path", "/nonexistent/prefix"), "/nonexistent/prefix"),
    "index file cut short": (("--data-path", "{damaged}/train"), "train.idx"),
    "corrupt cost table": (("--sparse-balance-cost-table", "{damaged}/costs.json"), "costs.json"),
    "global batch too small": (
        ("--global-batch-size", "2", "--micro-batch-size", "2"),
        "--global-batch-size 2 must be a multiple of --micro-batch-size 2 x data-parallel size 2",
    ),
}
"""One of each stage at which flags and files are read; tests/bad_inputs has all others."""


@pytest.mark.parametrize("case", CASES)
def test_bad_input_ends_in_one_clear_line(case: str, documents: Path, damaged: Path) -> None:
    extra, expected = CASES[case]
    extra = tuple(flag.format(damaged=damaged) for flag in extra)
    run = train(2, documents, *extra, timeout_s=90)
    assert run.exit_code != 0
    (line,) = {line for line in run.output.splitlines() if "sparse balance: error:" in line}
    assert expected in line
    assert "[rank0]: Traceback" not in run.output
    assert "before the start of training step" not in run.output
