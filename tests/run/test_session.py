# SPDX-License-Identifier: Apache-2.0
"""Ranks that would plan differently are found before the first step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import PROGRAMS, train

from sparsebalance_megatron.run.agreement import RankDisagreementError, check_ranks_agree


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
