# SPDX-License-Identifier: Apache-2.0
"""What a soak calls a difference and growth; the runs themselves take minutes."""

from __future__ import annotations

from typing import Any

import pytest
from soak.attempt import Attempt, Usage
from soak.command import _differences, _growth, _parse
from soak.setup import flags


def step(iteration: int, loss: float = 5.0) -> dict[str, Any]:
    same = {"predicted": {"makespan_ms": 1.0}, "coverage": {"mean": 0.5}, "tokens": 7}
    return {"iteration": iteration, "lm_loss": loss} | same


def test_a_step_differs_if_any_of_its_records_does() -> None:
    expected = [step(1), step(2), step(3)]
    assert _differences(expected, [step(1), step(2), step(2), step(3)]) == []
    last_bit = 5.000000000000001
    assert _differences(expected, [step(1), step(2), step(2, last_bit), step(3)]) == [2]
    assert _differences(expected, [step(1), step(4)]) == [4]


def test_growth_is_what_the_last_steps_hold_more_than_early_ones() -> None:
    usage = [
        Usage(step=n, resident_megabytes=500.0 + n, threads=8, open_files=40 + (n == 99))
        for n in range(100)
    ]
    found = _growth(Attempt(disturbance="none", first_step=0, usage=usage))
    assert found == {"resident_megabytes": 80.0, "threads": 0, "open_files": 1}
    assert _growth(Attempt(disturbance="none", first_step=0)) == {}


def test_numbers_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parse(["--kill-every", "0"])
    assert "--kill-every: at least 1" in capsys.readouterr().err


def test_a_run_resumes_from_its_own_folder(tmp_path) -> None:
    words = flags(tmp_path, tmp_path / "train", steps=12, save_every=3)
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1]
    assert words[words.index("--sparse-balance-calibration") + 1] == "off"
