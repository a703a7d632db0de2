# SPDX-License-Identifier: Apache-2.0
"""What a soak calls a difference, a whole log and growth."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from soak import command
from soak.attempt import Attempt, Usage
from soak.log import SoakLog, differing_steps, iterations_to_log
from soak.setup import flags


def step(iteration: int, loss: float = 5.0) -> dict[str, Any]:
    same = {"predicted": {"makespan_ms": 1.0}, "coverage": {"mean": 0.5}, "tokens": 7}
    return {"type": "step", "iteration": iteration, "lm_loss": loss} | same


def write_log(directory: Path, *records: dict[str, Any], end: str = "\n") -> None:
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "steps.jsonl").open("a") as log:
        log.write("\n".join(map(json.dumps, records)) + end)


def test_a_step_differs_if_any_of_its_records_does() -> None:
    expected = [step(1), step(2), step(3)]
    assert differing_steps(expected, [step(1), step(2), step(2), step(3)]) == []
    last_bit = 5.000000000000001
    assert differing_steps(expected, [step(1), step(2), step(2, last_bit), step(3)]) == [2]
    assert differing_steps(expected, [step(1), step(4)]) == [4]


def test_a_log_holds_the_steps_of_every_attempt() -> None:
    attempts = [
        Attempt(disturbance="delays", first_step=first, last_step=last)
        for first, last in ((0, 3), (2, 2), (2, 4))
    ]
    assert iterations_to_log(attempts) == [1, 2, 3, 3, 4]


def test_an_attempt_has_logged_what_is_behind_what_it_found(tmp_path: Path) -> None:
    write_log(tmp_path / "logs", {"type": "run"}, step(1), step(2))
    log = SoakLog(tmp_path)
    assert log.last_of_attempt(otherwise=1) == 1
    write_log(tmp_path / "logs", {"type": "run"})
    assert log.last_of_attempt(otherwise=1) == 1
    write_log(tmp_path / "logs", step(2))
    assert log.last_of_attempt(otherwise=1) == 2
    assert SoakLog(tmp_path / "nothing").last_of_attempt(otherwise=0) == 0


def test_logs_that_were_set_aside_come_first_and_cut_lines_are_no_steps(tmp_path: Path) -> None:
    write_log(tmp_path / "logs" / "earlier" / "2", step(2))
    write_log(tmp_path / "logs" / "earlier" / "1", step(1), end='\n{"type": "st')
    write_log(tmp_path / "logs", step(3))
    assert [record["iteration"] for record in SoakLog(tmp_path).steps()] == [1, 2, 3]


def test_growth_is_what_the_last_steps_hold_more_than_early_ones() -> None:
    usage = [
        Usage(step=n, resident_megabytes=500.0 + n, threads=8, open_files=40 + (n == 99))
        for n in range(100)
    ]
    attempt = Attempt(disturbance="none", first_step=0, usage=usage)
    found = command._growth(attempt)
    assert found == {"resident_megabytes": 80.0, "threads": 0, "open_files": 1}
    assert not command._is_flat(found, attempt)
    assert command._is_flat({"resident_megabytes": 20.0, "threads": 0, "open_files": 0}, attempt)
    assert command._growth(Attempt(disturbance="none", first_step=0)) == {}


def test_numbers_below_one_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command._parse(["--kill-every", "0"])
    assert "--kill-every: at least 1" in capsys.readouterr().err


def test_a_run_resumes_from_its_own_folder(tmp_path: Path) -> None:
    words = flags(tmp_path, tmp_path / "train", steps=12, save_every=3)
    assert words[words.index("--load") + 1] == words[words.index("--save") + 1]
    assert words[words.index("--sparse-balance-calibration") + 1] == "off"


@pytest.mark.distributed
def test_a_killed_and_starved_run_equals_the_one_left_alone(tmp_path: Path) -> None:
    arguments = ["--quick", "--json", str(tmp_path / "soak.json")]
    assert command.main(arguments) == 0
    result = json.loads((tmp_path / "soak.json").read_text())
    assert all(result["checks"].values())
    assert [attempt["ended"] for attempt in result["attempts"]] == [
        *("finished", "killed", "failed", "finished"),
    ]
    assert (tmp_path / "soak.svg").is_file()
