# SPDX-License-Identifier: Apache-2.0
"""Two runs alternate strictly, neither waits for one that has ended, and pauses take no time."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from alternating_run import Alternation, PausedClock
from harness import (
    BALANCE_FLAGS,
    MODEL_FLAGS,
    REPOSITORY,
    TRAINING_FLAGS,
    TrainingRun,
    run_training,
    write_documents,
)

from sparsebalance_megatron.log.reader import read_rank_logs

PROGRAM = REPOSITORY / "benchmarks" / "alternating_run.py"
TIMEOUT_S = 20.0
STEPS = 4


def _train(alternation: Alternation, name: str, steps: int, seen: list[str]) -> None:
    alternation.meet()
    for _ in range(steps):
        seen.append(name)
        alternation.hand_over()
    alternation.close()


def _both(directory: Path, first_steps: int, second_steps: int) -> list[str]:
    """Who trained, step by step."""
    seen: list[str] = []
    threads = []
    for name, steps in (("second", second_steps), ("first", first_steps)):
        run = Alternation(directory, 0, begins=name == "first", timeout_s=TIMEOUT_S)
        threads.append(threading.Thread(target=_train, args=(run, name, steps, seen), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    return seen


def test_steps_alternate(tmp_path: Path) -> None:
    assert _both(tmp_path / "new", 4, 4) == ["first", "second"] * 4


@pytest.mark.parametrize(("first", "second"), [(2, 5), (5, 2)])
def test_the_longer_run_goes_on_alone(tmp_path: Path, first: int, second: int) -> None:
    seen = _both(tmp_path, first, second)
    assert seen.count("first") == first and seen.count("second") == second
    assert seen[:4] == ["first", "second"] * 2


@pytest.mark.parametrize("begins", [True, False])
def test_a_run_that_never_comes_is_an_error(tmp_path: Path, begins: bool) -> None:
    with pytest.raises(TimeoutError):
        Alternation(tmp_path, 3, begins=begins, timeout_s=0.2).meet()


def test_a_socket_left_behind_does_no_harm(tmp_path: Path) -> None:
    with pytest.raises(TimeoutError):
        Alternation(tmp_path, 0, begins=True, timeout_s=0.1).meet()
    assert _both(tmp_path, 2, 2) == ["first", "second"] * 2


def test_a_paused_clock_stands_still() -> None:
    now = [10.0]
    clock = PausedClock(lambda: now[0])
    with clock.paused():
        now[0] = 14.0
        assert clock() == 10.0
    now[0] = 15.0
    assert clock() == 11.0


@pytest.mark.distributed
def test_two_training_runs_alternate(tmp_path: Path) -> None:
    """Their steps, by the wall clock, lie one behind the other."""
    write_documents(tmp_path / "train", [40, 90, 130, 60, 200, 30, 75, 110] * 4)
    runs: dict[str, TrainingRun] = {}

    def train(place: str) -> None:
        runs[place] = run_training(
            1,
            (
                *(*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS),
                *("--data-path", str(tmp_path / "train"), "--train-iters", str(STEPS)),
            ),
            log_dir=tmp_path / place,
            program=(str(PROGRAM), str(tmp_path / "meet"), place),
            torchrun=True,
        )

    threads = [threading.Thread(target=train, args=(place,)) for place in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for run in runs.values():
        run.require_success()
    assert "training on cpu" in runs["first"].output
    assert runs["first"].losses == runs["second"].losses
    starts_s = {place: _starts_s(tmp_path / place) for place in runs}
    order = [starts_s[place][step] for step in range(STEPS) for place in ("first", "second")]
    assert order == sorted(order)
    passed_ms = (starts_s["first"][-1] - starts_s["first"][0]) * 1e3
    counted_ms = [step["iteration_ms"] for step in runs["first"].steps[1:]]
    waited_ms = [step["iteration_ms"] for step in runs["second"].steps[1:]]
    assert sum(counted_ms) + sum(waited_ms) < 1.2 * passed_ms


def _starts_s(log_dir: Path) -> list[float]:
    steps = read_rank_logs(log_dir, range(1, STEPS + 1)).steps
    return [steps[iteration][0, 0].start_unix_s for iteration in range(1, STEPS + 1)]
