# SPDX-License-Identifier: Apache-2.0
"""Bad input ends every rank with one clear line, before anything is built."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    run_training,
    write_documents,
)

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_documents(tmp_path_factory.mktemp("documents") / "train", [100, 60, 200, 30] * 4)


CASES = {
    "block size 0": (("--sparse-balance-block-size", "0"), "--sparse-balance-block-size 0"),
    "global batch smaller than slots": (
        ("--global-batch-size", "2", "--micro-batch-size", "2"),
        "global",
    ),
    "cap below the longest sample": (
        ("--sparse-balance-max-tokens-per-micro-batch", "100"),
        "use at least 256",
    ),
    "attention dropout": (("--attention-dropout", "0.1"), "use --attention-dropout 0"),
    "two data prefixes": (("--data-path", "one", "two"), "blends are not supported"),
    "missing data": (("--data-path", "/nonexistent/prefix"), "/nonexistent/prefix"),
    "missing cost table": (
        ("--sparse-balance-cost-table", "/nonexistent.json"),
        "nonexistent.json",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_flags_name_flag_and_remedy(case: str, documents: Path) -> None:
    extra, expected = CASES[case]
    flags = (
        *MODEL_FLAGS,
        *TRAINING_FLAGS,
        *BALANCE_FLAGS,
        *("--data-path", str(documents)),
        *extra,
    )
    run = run_training(2, flags, timeout_s=90)
    assert run.exit_code != 0
    assert expected in run.output
    assert "before the start of training step" not in run.output
