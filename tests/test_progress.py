# SPDX-License-Identifier: Apache-2.0
"""Long computations say how far they are, short ones nothing."""

from __future__ import annotations

import io

import pytest

from sparsebalance_megatron.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, *, parts: int, seconds_each: float) -> str:
    """What is written for parts that take so long each."""
    now = [100.0]
    progress = Progress("plan", parts, stream=stream, clock=lambda: now[0])
    for _ in range(parts):
        now[0] += seconds_each
        progress()
    progress.close()
    return stream.getvalue()


@pytest.mark.parametrize("stream", [Terminal(), io.StringIO()])
def test_nothing_is_said_within_five_seconds(stream: io.StringIO) -> None:
    assert shown(stream, parts=49, seconds_each=0.1) == ""


def test_a_log_gets_a_line_every_ten_seconds() -> None:
    assert shown(io.StringIO(), parts=30, seconds_each=1.0).splitlines() == [
        "plan: 5 of 30 steps, 25 s left",
        "plan: 15 of 30 steps, 15 s left",
        "plan: 25 of 30 steps, 5 s left",
    ]


def test_a_terminal_gets_a_bar_that_goes() -> None:
    bars = shown(Terminal(), parts=8, seconds_each=60.0).split("\r")
    assert bars[1] == "plan: 1 of 8 steps, 7 min left [###.....................]\x1b[K"
    assert len(bars) == 10 and bars[-1] == "\x1b[K"
