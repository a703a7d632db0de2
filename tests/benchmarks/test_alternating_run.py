# SPDX-License-Identifier: Apache-2.0
"""Runs that take steps in turn."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from alternating_run import Alternation, PausedClock


@pytest.mark.parametrize("runs", [2, 3, 4])
def test_every_run_takes_one_step_before_any_takes_another(tmp_path: Path, runs: int) -> None:
    steps, taken = 3, []

    def run(place: int) -> None:
        alternation = Alternation(tmp_path, 0, place=place, runs=runs, timeout_s=30.0)
        alternation.meet()
        for _ in range(steps):
            taken.append(place)
            alternation.hand_over()

    with ThreadPoolExecutor(runs) as pool:
        for finished in [pool.submit(run, place) for place in reversed(range(runs))]:
            finished.result(timeout=60)
    assert taken == [*range(runs)] * steps


def test_a_run_without_the_others_names_what_is_missing(tmp_path: Path) -> None:
    alone = Alternation(tmp_path, 0, place=1, runs=3, timeout_s=0.2)
    with pytest.raises(TimeoutError, match=r"run-2-rank-00000: no run came"):
        alone.meet()


def test_a_paused_clock_leaves_the_pause_out() -> None:
    now_s = [0.0]
    clock = PausedClock(lambda: now_s[0])
    now_s[0] = 1.0
    with clock.paused():
        now_s[0] = 5.0
        assert clock() == 1.0
    now_s[0] = 6.0
    assert clock() == 2.0
