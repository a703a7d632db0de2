# SPDX-License-Identifier: Apache-2.0
"""What a picture of a step says of rows that ranks shared."""

from __future__ import annotations

import numpy as np

from sparsebalance_megatron.report.charts.timeline import Panel, _caption, _Scale, shared_rows
from sparsebalance_megatron.report.timeline import MEASURED, Bar, Timeline
from sparsebalance_megatron.telemetry.rank_record import RankMicroBatch, RankStep


def held(position: int, width: int, member: int) -> RankMicroBatch:
    return RankMicroBatch(
        position=position,
        lengths_tokens=(400,),
        budgets_LS=np.ones((1, 1)),
        coverage_S=(),
        width=width,
        member=member,
    )


def panel(width: int) -> Panel:
    """Two ranks share position 1, or do not."""
    bars = tuple(
        Bar(place=(rank, 0), direction="forward", chunk=0, position=m, start_ms=m, end_ms=m + 1.0)
        for rank in (0, 1)
        for m in (0, 1)
    )
    contents = {
        (rank, 0): RankStep(
            start_unix_s=None,
            micro_batches=(held(0, 1, 0), held(1, width, rank % width)),
            spans=(),
            unmeasured=0,
        )
        for rank in (0, 1)
    }
    return Panel(name="measured", timeline=Timeline(bars=bars, source=MEASURED), contents=contents)


def test_shared_rows_are_marked_and_coloured_by_what_a_rank_had() -> None:
    shared = panel(2)
    assert shared_rows(shared.contents) == {(0, 1), (1, 1)}
    scale = _Scale([shared])
    assert [scale.share(shared, bar) for bar in shared.timeline.bars] == [1.0, 0.5, 1.0, 0.5]
    assert "neighbouring ranks shared" in _caption([shared], ((0, 0), (1, 0)), scale)


def test_without_them_nothing_is_said() -> None:
    narrow = panel(1)
    assert shared_rows(narrow.contents) == set()
    assert "shared" not in _caption([narrow], ((0, 0), (1, 0)), _Scale([narrow]))
