# SPDX-License-Identifier: Apache-2.0
"""Bad input, and ranks that differ, end every rank with one clear line before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import PROGRAMS, train

from sparsebalance_megatron.run.agreement import RankDisagreementError, check_ranks_agree

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


@pytest.mark.distributed
def test_ranks_with_different_flags_stop_at_start_and_name_the_flag(documents: Path) -> None:
    program = (str(PROGRAMS / "failing_rank.py"), "flags", "0")
    run = train(2, documents, "--sparse-balance-device", "cpu", program=program, timeout_s=120)
    assert run.exit_code != 0
    assert "flag base_budget: rank 0 has '4', rank 1 has '2'" in run.output
    assert not run.losses


def agree(monkeypatch: pytest.MonkeyPatch, *ranks: dict[str, str]) -> None:
    """What every rank would do that gathers these entries."""

    def gather(into: list[object], mine: object) -> None:
        into[:] = ranks

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: len(ranks))
    monkeypatch.setattr(torch.distributed, "all_gather_object", gather)
    check_ranks_agree(ranks[0])


def test_everything_that_differs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RankDisagreementError) as caught:
        agree(monkeypatch, {"cost model": "A", "numpy": "2.1"}, {"cost model": "B", "numpy": "2.2"})
    message = str(caught.value)
    for part in ("cost model", "'A'", "'B'", "'2.1'", "'2.2'"):
        assert part in message
