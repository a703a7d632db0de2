# SPDX-License-Identifier: Apache-2.0
"""The comparison of placements, with a framework that deals samples out in turn."""

from __future__ import annotations

import host_placements as placements
import numpy as np


def in_turn(lengths: list[int]) -> placements.Placement:
    return [
        [[sample] for sample in range(rank, len(lengths), placements.RANKS)]
        for rank in range(placements.RANKS)
    ]


def test_ways_to_place_are_compared_on_the_same_steps() -> None:
    rows = placements.compare({"in turn": in_turn}, "prolong", 1, 32, steps=2)
    assert list(rows) == ["in turn", placements.OURS]
    theirs, ours = rows["in turn"], rows[placements.OURS]
    assert len(theirs.step_ms) == len(ours.step_ms) == len(theirs.cpu_s) == 2
    assert (np.array(theirs.step_ms) > np.array(ours.step_ms)).all()
    assert theirs.micro_batches == 2 * placements.SAMPLES and theirs.above_cap == 0


def test_a_placement_above_the_cap_is_counted() -> None:
    def all_of_a_rank(lengths: list[int]) -> placements.Placement:
        return [[[s for (s,) in mine]] for mine in in_turn(lengths)]

    rows = placements.compare({"one row": all_of_a_rank}, "longalign", 1, 32, steps=1)
    assert rows["one row"].above_cap == rows["one row"].micro_batches == placements.RANKS
    assert rows[placements.OURS].above_cap == 0
