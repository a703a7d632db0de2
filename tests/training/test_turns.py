# SPDX-License-Identifier: Apache-2.0
"""Two sides take turns strictly, and neither waits for one that has ended or never came."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.training.turns import Turns, TurnsError, parse_turns

TIMEOUT_S = 20.0


def _take(turns: Turns, name: str, steps: int, seen: list[str]) -> None:
    turns.meet()
    for _ in range(steps):
        seen.append(name)
        turns.hand_over()


def _both(directory: Path, first_steps: int, second_steps: int) -> tuple[list[str], list[str]]:
    """Who stepped in which order, and what was said."""
    seen: list[str] = []
    said: list[str] = []
    threads = []
    for side, steps in (("second", second_steps), ("first", first_steps)):
        turns = Turns(directory, side, world_rank=0, timeout_s=TIMEOUT_S, say=said.append)

        def run(turns: Turns = turns, side: str = side, steps: int = steps) -> None:
            _take(turns, side, steps, seen)
            turns.close()

        threads.append(threading.Thread(target=run, daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()
    return seen, said


def test_steps_alternate(tmp_path: Path) -> None:
    seen, said = _both(tmp_path / "turns", 4, 4)
    assert seen == ["first", "second"] * 4
    assert len(said) == 1


@pytest.mark.parametrize(("first", "second"), [(2, 5), (5, 2)])
def test_the_longer_run_goes_on_alone(tmp_path: Path, first: int, second: int) -> None:
    seen, said = _both(tmp_path, first, second)
    assert seen.count("first") == first and seen.count("second") == second
    assert seen[:4] == ["first", "second"] * 2
    assert len(said) == 1


@pytest.mark.parametrize("side", ["first", "second"])
def test_who_never_comes_is_missed(tmp_path: Path, side: str) -> None:
    turns = Turns(tmp_path, side, world_rank=3, timeout_s=0.2)
    with pytest.raises(TurnsError, match=r"rank-00003: no other run came within 0 s"):
        turns.meet()


def test_a_socket_left_behind_does_no_harm(tmp_path: Path) -> None:
    for _ in range(2):
        with pytest.raises(TurnsError):
            Turns(tmp_path, "first", world_rank=0, timeout_s=0.1).meet()
    assert _both(tmp_path, 2, 2)[0] == ["first", "second"] * 2


def test_what_the_flag_takes() -> None:
    assert parse_turns("runs/a:b:second") == (Path("runs/a:b"), "second")
    for wrong in ("runs", "runs:third", ":first", ""):
        with pytest.raises(ConfigError, match=r"in-turn .*must be DIR:first in one run"):
            SparseBalanceConfig(in_turn=wrong)
