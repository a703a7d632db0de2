# SPDX-License-Identifier: Apache-2.0
"""examples/hosts/fully_shard.py: a host with FSDP2 on one and on two gloo ranks."""

from __future__ import annotations

import json
from typing import Any

import pytest
from harness import PROGRAMS, REPOSITORY, run_training

pytestmark = pytest.mark.distributed

FEW_ROUNDINGS = 16 * 2.0**-23
"""Ranks differ in the order of float32 sums only, and every step begins with the last one's."""
EXAMPLE = REPOSITORY / "examples/hosts/fully_shard.py"


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("sharded")
    program = (str(PROGRAMS / "sharded_host.py"), str(EXAMPLE), str(directory))
    found = {}
    for ranks in (1, 2):
        run_training(ranks, (), program=program).require_success()
        paths = [directory / f"sharded{ranks}-rank{rank}.json" for rank in range(ranks)]
        found[ranks] = [json.loads(path.read_text()) for path in paths]
    return found


def test_losses_of_two_ranks_are_those_of_one(worlds: Any) -> None:
    ((alone,), both) = worlds[1], worlds[2]
    for rank in both:
        assert rank["dense"]["losses"] == pytest.approx(alone["dense"]["losses"], rel=FEW_ROUNDINGS)
    assert len(set(alone["dense"]["losses"])) == 4


def test_tuned_steps_are_alike_on_both_ranks(worlds: Any) -> None:
    first, second = worlds[2]
    assert first["tuned"] == second["tuned"]
    figures = first["tuned"]["figures"]
    assert all(0.0 < step["sparse-balance/coverage"] <= 1.0 for step in figures)
    assert any(step["sparse-balance/tuned-samples"] > 0 for step in figures)
