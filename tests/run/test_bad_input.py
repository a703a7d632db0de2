# SPDX-License-Identifier: Apache-2.0
"""Bad input, and ranks that differ, end every rank with one clear line before the first step."""

import re
from pathlib import Path

import pytest
from harness import PROGRAMS, train

pytestmark = pytest.mark.distributed


@pytest.fixture
def damaged(documents: Path, tmp_path: Path) -> Path:
    """A directory with an index file cut short, and a cost table that is no table."""
    for suffix, end in ((".bin", None), (".idx", -9)):
        raw = documents.with_suffix(suffix).read_bytes()[:end]
        (tmp_path / "train").with_suffix(suffix).write_bytes(raw)
    (tmp_path / "costs.json").write_text('{"format_version": 1, "rows": [')
    return tmp_path


CASES = {
    "block size 0": (("--sparse-balance-block-size", "0"), "--sparse-balance-block-size 0"),
    "index file cut short": (("--data-path", "{damaged}/train"), "train.idx"),
    "corrupt cost table": (("--sparse-balance-cost-table", "{damaged}/costs.json"), "costs.json"),
    "Megatron's model config": (("--recompute-granularity", "full"), "recompute_method must be"),
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


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("flags", r"flag base_budget: rank 0 has '4', rank 1 has '2' .*flag log_megabytes: rank 0"),
        ("plain", "--sparse-balance: rank 1 was started without it"),
    ],
)
def test_ranks_with_different_flags_stop_at_start_and_name_the_flags(
    fault: str, told: str, documents: Path
) -> None:
    program = (str(PROGRAMS / "failing_rank.py"), fault, "0")
    run = train(2, documents, "--sparse-balance-device", "cpu", program=program, timeout_s=120)
    assert run.exit_code != 0
    assert re.search(told, run.output)
    assert not run.losses
