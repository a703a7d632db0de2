# SPDX-License-Identifier: Apache-2.0
"""examples/hosts/own_data.py and fully_shard.py, run on gloo ranks, and a host's mistakes."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import PROGRAMS, REPOSITORY, run_training

pytestmark = pytest.mark.distributed

FEW_ROUNDINGS = 8 * 2.0**-23
"""Placements and layouts differ in the order of float32 sums only."""
SHARDED_ROUNDINGS = 16 * 2.0**-23
"""Every step begins with the last one's, too."""
SHARDED = str(REPOSITORY / "examples/hosts/fully_shard.py")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("host") / "host.py"
    return shutil.copy(REPOSITORY / "examples/hosts/own_data.py", path)


@pytest.fixture(scope="module")
def ranks(host: Path) -> list[dict[str, Any]]:
    return _run(2, host)


@pytest.fixture(scope="module")
def alone(host: Path) -> dict[str, Any]:
    (found,) = _run(1, host)
    return found


@pytest.fixture(scope="module")
def four_ranks(host: Path) -> list[dict[str, Any]]:
    return _run(4, host)


def _run(ranks: int, host: Path) -> list[dict[str, Any]]:
    program = (str(PROGRAMS / "trainer_loops.py"), "host", str(host), str(host.parent))
    run_training(ranks, (SHARDED,), program=program).require_success()
    paths = [host.parent / f"world{ranks}-rank{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in paths]


def test_losses_depend_neither_on_placement_nor_on_the_layout(ranks: list[dict[str, Any]]) -> None:
    """Budgets of more blocks than any sample has: dense attention within documents."""
    dense = ranks[0]["pp1"]["dense"]
    assert ranks[0]["pp1"]["otherwise placed"] == pytest.approx(dense, rel=FEW_ROUNDINGS)
    assert ranks[0]["pp2"]["dense"] == pytest.approx(dense, rel=FEW_ROUNDINGS)


def test_ranks_with_experts_train_alike_in_any_number_of_micro_batches(
    ranks: list[dict[str, Any]],
) -> None:
    planned, fixed = (ranks[0]["positions"][name] for name in ("planned", "fixed"))
    assert planned["losses"] == pytest.approx(fixed["losses"], rel=FEW_ROUNDINGS)
    assert len(set(fixed["losses"])) == len(fixed["numbers"]) == 4
    assert ranks[1]["positions"]["planned"]["numbers"] == planned["numbers"]


def test_budgets_are_tuned_and_ranks_agree(ranks: list[dict[str, Any]]) -> None:
    figures = ranks[0]["pp1"]["figures"]
    assert figures == ranks[1]["pp1"]["figures"]
    assert any(step["sparse-balance/tuned-samples"] > 0 for step in figures)
    assert all(0.0 < step["sparse-balance/coverage"] <= 1.0 for step in figures)
    assert all(step["sparse-balance/imbalance"] >= 1.0 for step in figures)


def test_a_checkpoint_goes_on_as_if_training_had_never_stopped(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["pp1"]["resumed"] == ranks[0]["pp1"]["tuned"]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", ["forward", "update"])
def test_passes_execute_the_budgets_that_are_planned(
    rank: int, kind: str, ranks: list[dict[str, Any]]
) -> None:
    """Layer by layer. The update's are 1 block."""
    passes = ranks[rank]["pp1"]["pinned"]
    assert passes[kind] == passes[f"{kind} planned"]


def test_a_plan_of_a_given_placement_is_that_of_all_ranks(ranks: list[dict[str, Any]]) -> None:
    placed = [[0, 0, [10, 20]], [0, 1, [30]], [1, 0, [11, 20]], [1, 1, [30]]]
    assert [rank["pp1"]["as placed"] for rank in ranks] == [placed, placed]


def test_megatron_training_is_never_loaded(ranks: list[dict[str, Any]]) -> None:
    assert [rank["loaded"] for rank in ranks] == [[], []]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("wrong row", "the sequence's samples have 5"),
        ("other format", "needs PackedSeqParams in the thd layout"),
        ("no such micro-batch", "micro-batch 99: the plan has"),
        ("step never ended", "but end_step was not called for step"),
        ("other plans", "PlanMismatchError: ranks 1 executed another plan than rank 0"),
        ("step log", "--sparse-balance-log-dir here: not for a trainer with its own loop"),
    ],
)
def test_a_mistake_is_told(mistake: str, message: str, ranks: list[dict[str, Any]]) -> None:
    assert message in ranks[0]["pp1"]["mistakes"][mistake]


def test_own_packed_sequences_train_alike(ranks: list[dict[str, Any]]) -> None:
    cut, own = ranks[0]["pp1"]["own parameters"]
    assert own == cut


def test_shared_micro_batches_train_to_the_losses_of_one_rank(
    alone: dict[str, Any], four_ranks: list[dict[str, Any]]
) -> None:
    """As planned over four data-parallel ranks, in pipelines, and in groups of Megatron's own."""
    cp_sizes = {"data": [1, 2, 4], "pipeline": [1, 2], "context": [2]}
    for layout, sizes in cp_sizes.items():
        found = four_ranks[0][layout]
        assert found["losses"] == pytest.approx(alone["dense"], rel=FEW_ROUNDINGS)
        assert found["cp_sizes"] == sizes


def test_members_hold_every_token_once_at_its_place(four_ranks: list[dict[str, Any]]) -> None:
    """Parts make the whole again, whose gradient is each rank's own."""
    owners: dict[tuple[int, int], np.ndarray] = {}
    for rank in four_ranks:
        for position, part in enumerate(rank["data"]["held"]):
            assert part["position_ids"] == part["positions"]
            assert part["whole"] == [*range(len(part["own"]))]
            place = part["first rank"], position
            owners[place] = owners.get(place, 0) + np.array(part["own"])
    assert all((count_T == 1).all() for count_T in owners.values())


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("own parameters", "ranks share micro-batches; give None as packed_seq_params"),
        ("no model", "ranks share micro-batches; give None as packed_seq_params and the model"),
        ("missing labels", "labels has 3 tokens, the samples of the plan"),
        ("other plans", "PlanMismatchError: step 4: ranks [1, 2, 3] planned another step than"),
    ],
)
def test_a_mistake_with_shared_micro_batches_is_told(
    mistake: str, message: str, four_ranks: list[dict[str, Any]]
) -> None:
    assert message in four_ranks[0]["data"]["mistakes"][mistake]


def test_a_failure_of_one_rank_fails_all_of_them(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["pp1"]["mistakes"]["one rank only"] for rank in ranks)
    assert "end_step: ranks 1 have a problem of their own to report" in first
    assert re.search(r"end_step after \d forward steps, expected \d: attach each", second)


def test_sharded_losses_of_two_ranks_are_those_of_one(
    alone: dict[str, Any], ranks: list[dict[str, Any]]
) -> None:
    expected = alone["sharded"]["dense"]["losses"]
    assert len(set(expected)) == 4
    for rank in ranks:
        found = rank["sharded"]["dense"]["losses"]
        assert found == pytest.approx(expected, rel=SHARDED_ROUNDINGS)


def test_tuned_sharded_steps_are_alike_on_both_ranks(ranks: list[dict[str, Any]]) -> None:
    first, second = (rank["sharded"]["tuned"] for rank in ranks)
    assert first == second
    assert all(0.0 < step["sparse-balance/coverage"] <= 1.0 for step in first["figures"])
    assert any(step["sparse-balance/tuned-samples"] > 0 for step in first["figures"])
