# SPDX-License-Identifier: Apache-2.0
"""examples/hosts/own_loop.py, own_data.py and fully_shard.py, run as they stand there.

tests/programs/trainer_loops.py judges what one run shows alone, and what a loop can do wrong. That
shared micro-batches, segments and planned numbers of positions train alike in a trainer's loop is
for test_matrix: Megatron's own loop runs through the same :class:`.TrainerRun`.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import (
    FEW_ROUNDINGS,
    PROGRAMS,
    REPOSITORY,
    assert_same_steps,
    measured_ms,
    read_steps,
    run_training,
)

pytestmark = pytest.mark.distributed

HOSTS = REPOSITORY / "examples" / "hosts"
STEPS = 4
SHARDED_ROUNDINGS = 16 * 2.0**-23
"""Every step begins with the last one's, too."""
LOGS = {"dp2": "pp1", "pp2": "pp2"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("trainer")


@pytest.fixture(scope="module")
def plain(documents: Path, directory: Path) -> list[float]:
    """Losses of Megatron without the plugin, one document at a time."""
    (found,) = _run(1, "trainer", directory, documents)
    assert len(found["plain"]) == STEPS
    return found["plain"]


@pytest.fixture(scope="module")
def two_ranks(documents: Path, directory: Path) -> dict[str, Any]:
    first, second = _run(2, "trainer", directory, documents)
    assert first == second
    return first


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What every rank of one, two and four left."""
    directory = tmp_path_factory.mktemp("host")
    return {ranks: _run(ranks, "host", directory, HOSTS / "fully_shard.py") for ranks in (1, 2, 4)}


def _run(ranks: int, kind: str, directory: Path, other: Path) -> list[dict[str, Any]]:
    """What every rank left of a run with ``other``, the data set or a further example."""
    example = HOSTS / ("own_loop.py" if kind == "trainer" else "own_data.py")
    program = (str(PROGRAMS / "trainer_loops.py"), kind, str(example), str(directory), str(other))
    run_training(ranks, (), program=program).require_success()
    paths = [directory / f"world{ranks}-rank{rank}.json" for rank in range(ranks)]
    return [json.loads(path.read_text()) for path in paths]


@pytest.mark.parametrize("layout", [*LOGS, "gpipe", "chunks"])
def test_losses_are_those_of_megatron_without_the_plugin(
    layout: str, plain: list[float], two_ranks: dict[str, Any]
) -> None:
    """Budgets that cover every sample, and batching: same mathematics as one document at a time."""
    expected = plain[:1] if layout == "chunks" else plain
    assert two_ranks[layout]["dense"] == pytest.approx(expected, rel=FEW_ROUNDINGS)


@pytest.mark.usefixtures("two_ranks")
def test_an_order_of_its_own_is_run_and_measured(directory: Path) -> None:
    """All forwards of a stage, then all backwards."""
    for rank in range(2):
        for step in read_steps(directory / "gpipe", rank)[1:]:
            forward, backward = step["spans"][:8], step["spans"][8:]
            assert [tuple(span[:3]) for span in forward] == [("forward", 0, m) for m in range(8)]
            assert [tuple(span[:3]) for span in backward] == [("backward", 0, m) for m in range(8)]


@pytest.mark.usefixtures("two_ranks")
def test_model_chunks_are_measured(directory: Path) -> None:
    (step,) = read_steps(directory / "chunks")
    assert measured_ms(step).size == 2 * 8 * 4
    assert (measured_ms(step) > 0).all()


@pytest.mark.parametrize("layout", LOGS)
def test_every_micro_batch_is_measured_and_budgets_are_tuned(
    layout: str, two_ranks: dict[str, Any], directory: Path
) -> None:
    steps = read_steps(directory / LOGS[layout])
    assert [step["iteration"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert measured_ms(step).size == 2 * 8 * (2 if layout == "pp2" else 1)
        assert (measured_ms(step) > 0).all()
    assert np.all([step["measured"]["schedule_ms"] for step in steps[1:]])
    tuned = [
        step["figures"]
        for step in steps
        if step["predicted"]["samples_cut"] + step["predicted"]["samples_raised"]
    ]
    assert tuned
    for figures in tuned:
        assert figures["coverage"] != figures["coverage_base"]
        assert figures["coverage"] >= figures["coverage_base"] - 0.15
    assert [step["figures"]["coverage"] for step in steps] == [
        figures["sparse-balance/coverage"] for figures in two_ranks[layout]["figures"]
    ]


@pytest.mark.parametrize("layout", LOGS)
def test_a_resumed_run_logs_the_steps_of_one_that_never_stopped(
    layout: str, two_ranks: dict[str, Any], directory: Path
) -> None:
    """And the log has the trainer's own losses."""
    whole, resumed = (read_steps(directory / f"{LOGS[layout]}{name}") for name in ("", "-resumed"))
    losses = [step["lm_loss"] for step in whole]
    assert losses == pytest.approx(two_ranks[layout]["tuned"], rel=FEW_ROUNDINGS)
    assert len(resumed) == len(whole)
    assert_same_steps(resumed, whole, loss=False)


@pytest.mark.usefixtures("plain")
def test_a_model_without_hooks_is_measured_too(directory: Path) -> None:
    """No data-parallel wrapper: neither timers nor a function that finalises gradients. Evaluation
    before and after the schedule is not measured."""
    first, second = read_steps(directory / "bare")
    for step in (first, second):
        assert (measured_ms(step) > 0).all()
    (schedule_ms,) = second["measured"]["schedule_ms"][0]
    assert schedule_ms >= second["figures"]["busiest_rank_ms_measured"]
    spans = read_steps(directory / "bare", 0)[-1]["spans"]
    assert len(spans) == 2 * 8
    assert all(0 <= start < end <= schedule_ms for *_, start, end, _ in spans)


@pytest.mark.parametrize("kind", ["replicated", "sharded"])
def test_budgets_are_tuned_and_ranks_agree(
    kind: str, host: dict[int, list[dict[str, Any]]]
) -> None:
    first, second = (
        rank["sharded"]["tuned"] if kind == "sharded" else rank["tuned"] for rank in host[2]
    )
    assert first == second
    assert any(step["sparse-balance/tuned-samples"] > 0 for step in first["figures"])
    assert all(0.0 < step["sparse-balance/coverage"] <= 1.0 for step in first["figures"])
    # Own times of ranks that gather weights in every layer are not known.
    imbalance = [step["sparse-balance/imbalance"] for step in first["figures"]]
    assert np.isnan(imbalance).all() if kind == "sharded" else min(imbalance) >= 1.0


def test_sharded_losses_of_two_ranks_are_those_of_one(
    host: dict[int, list[dict[str, Any]]],
) -> None:
    (alone,) = host[1]
    expected = alone["sharded"]["dense"]["losses"]
    assert len(set(expected)) == STEPS
    for rank in host[2]:
        found = rank["sharded"]["dense"]["losses"]
        assert found == pytest.approx(expected, rel=SHARDED_ROUNDINGS)


def test_shared_micro_batches_train_to_the_losses_of_one_rank(
    host: dict[int, list[dict[str, Any]]],
) -> None:
    """As planned over four data-parallel ranks, in pipelines, and in groups of Megatron's own."""
    (alone,) = host[1]
    cp_sizes = {"data": [1, 2, 4], "pipeline": [1, 2], "context": [2]}
    for layout, sizes in cp_sizes.items():
        found = host[4][0][layout]
        assert found["losses"] == pytest.approx(alone["dense"], rel=FEW_ROUNDINGS)
        assert found["cp_sizes"] == sizes


def test_members_hold_every_token_once_at_its_place(
    host: dict[int, list[dict[str, Any]]],
) -> None:
    """Parts make the whole again, whose gradient is each rank's own."""
    owners: dict[tuple[int, int], np.ndarray] = {}
    for rank in host[4]:
        for position, part in enumerate(rank["held"]):
            assert part["position_ids"] == part["positions"]
            assert part["whole"] == [*range(len(part["own"]))]
            place = part["first rank"], position
            owners[place] = owners.get(place, 0) + np.array(part["own"])
    assert all((count_T == 1).all() for count_T in owners.values())
