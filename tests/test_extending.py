# SPDX-License-Identifier: Apache-2.0
"""The examples of docs/EXTENDING.md and docs/PYTHON.md run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sparsebalance_megatron.plan.budgets.policy import BUDGET_POLICIES

DOCS = Path(__file__).parents[1] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text("utf-8"), re.M | re.S)


def run(block: str) -> dict[str, Any]:
    """The names that a block leaves."""
    names: dict[str, Any] = {}
    exec(compile(block, "example", "exec"), names)
    return names


def example(name: str) -> dict[str, Any]:
    """The block of EXTENDING.md that defines a name, run."""
    (block,) = (block for block in blocks("EXTENDING.md") if re.search(rf"\b{name}\b", block))
    return run(block)


def test_the_selector_passes_its_check() -> None:
    example("check_selector")


def test_the_budget_policy_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUDGET_POLICIES, "floor", None)
    outcomes = example("FloorPolicy")["outcomes"]
    assert outcomes["floor"].speedup > 1.0 == outcomes["fixed"].speedup
    assert outcomes["fixed"].coverage_mean - 0.1 <= outcomes["floor"].coverage_mean


def test_the_schedule_takes_what_its_comment_says(capsys: pytest.CaptureFixture[str]) -> None:
    example("gpipe")
    assert capsys.readouterr().out.split("\n")[:2] == [str(np.array([22.0]))] * 2


def test_the_exchange_gives_the_attention_of_one_rank() -> None:
    from sparsebalance_megatron.attention.api import budgeted_attention

    names = example("CountingExchange")
    alone = budgeted_attention(
        *(names["q"], names["k"], names["v"], [0, 100, 300], 4),
        block_size=16,
        softmax_scale=names["scale"],
    )
    assert all(map(np.array_equal, alone, (names["out"], names["lse"])))
    assert names["exchange"].read_bytes == 2 * 300 * 2 * 32 * 4


def test_examples_of_the_python_page_run() -> None:
    for block in blocks("PYTHON.md"):
        run(block)
