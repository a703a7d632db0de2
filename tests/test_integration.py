# SPDX-License-Identifier: Apache-2.0
"""examples/hosts/own_loop.py, run as it stands there, and what a trainer can do wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import (
    PROGRAMS,
    REPOSITORY,
    assert_same_steps,
    measured_ms,
    read_steps,
    run_training,
)

pytestmark = pytest.mark.distributed

PROGRAM = PROGRAMS / "trainer_loops.py"
TRAINER = REPOSITORY / "examples/hosts/own_loop.py"
STEPS = 4
FEW_ROUNDINGS = 8 * 2.0**-23
"""Layouts and attention implementations differ in the order of float32 sums only."""
LAYOUTS = ["dp2", "pp2"]
LOGS = {"dp2": "pp1", "pp2": "pp2"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("output")


@pytest.fixture(scope="module")
def one_rank(documents: Path, directory: Path) -> dict[str, Any]:
    return _run(1, documents, directory)


@pytest.fixture(scope="module")
def two_ranks(documents: Path, directory: Path) -> dict[str, Any]:
    return _run(2, documents, directory)


def _run(ranks: int, documents: Path, directory: Path) -> dict[str, Any]:
    program = (str(PROGRAM), "trainer", str(TRAINER), str(directory), str(documents))
    run_training(ranks, (), program=program).require_success()
    paths = [directory / f"world{ranks}-rank{rank}.json" for rank in range(ranks)]
    first, *others = (json.loads(path.read_text()) for path in paths)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_megatron_without_the_plugin(
    layout: str, one_rank: dict[str, Any], two_ranks: dict[str, Any]
) -> None:
    """Budgets that cover every sample, and batching: same mathematics as one document at a time."""
    assert len(one_rank["plain"]) == STEPS
    assert two_ranks[layout]["dense"] == pytest.approx(one_rank["plain"], rel=FEW_ROUNDINGS)


def test_model_chunks_train_and_are_measured(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], directory: Path
) -> None:
    (loss,) = two_ranks["chunks"]["dense"]
    assert loss == pytest.approx(one_rank["plain"][0], rel=FEW_ROUNDINGS)
    (step,) = read_steps(directory / "chunks")
    assert measured_ms(step).size == 2 * 8 * 4
    assert (measured_ms(step) > 0).all()


def test_rows_on_both_ranks_train_alike(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], directory: Path
) -> None:
    assert two_ranks["shared"]["dense"] == pytest.approx(one_rank["plain"], rel=FEW_ROUNDINGS)
    for rank in range(2):
        steps = read_steps(directory / "shared", rank)
        held = [each for step in steps for each in step["micro_batches"]]
        assert {rank - each["rank"] for each in held if each["cp_size"] == 2} == {rank}
    steps = read_steps(directory / "shared")
    assert [step["lm_loss"] for step in steps] == pytest.approx(
        two_ranks["shared"]["dense"], rel=FEW_ROUNDINGS
    )


def test_planned_numbers_of_micro_batches_train_alike(
    two_ranks: dict[str, Any], directory: Path
) -> None:
    found = two_ranks["positions"]
    assert found["planned"] == pytest.approx(found["fixed"], rel=FEW_ROUNDINGS)
    assert len(set(found["fixed"])) == STEPS
    counts = {
        name: [measured_ms(step).shape[-1] for step in read_steps(directory / name)]
        for name in ("planned", "fixed")
    }
    assert counts["fixed"] == [4] * STEPS
    assert min(counts["planned"]) < 4
    assert found["unwrapped"] == [4, 4]


def test_segments_train_alike(
    one_rank: dict[str, Any], two_ranks: dict[str, Any], directory: Path
) -> None:
    assert two_ranks["segments"]["dense"] == pytest.approx(one_rank["plain"], rel=FEW_ROUNDINGS)
    steps = read_steps(directory / "segments")
    assert all(max(step["segments_RM"][0]) > 1 for step in steps)
    assert "call wrap_schedule before train_data_iterator" in two_ranks["segments"]["mistake"]


@pytest.mark.parametrize("layout", LAYOUTS)
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


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_resumes_as_if_training_had_never_stopped(
    layout: str, two_ranks: dict[str, Any], directory: Path
) -> None:
    """And the log has the trainer's own losses."""
    tuned = two_ranks[layout]["tuned"]
    whole, resumed = (read_steps(directory / f"{LOGS[layout]}{name}") for name in ("", "-resumed"))
    assert [step["lm_loss"] for step in whole] == pytest.approx(tuned, rel=FEW_ROUNDINGS)
    assert two_ranks[layout]["resumed"] == tuned
    assert len(resumed) == len(whole)
    assert_same_steps(resumed, whole, loss=False)


def test_a_model_without_hooks_is_measured_too(one_rank: dict[str, Any], directory: Path) -> None:
    """No data-parallel wrapper: neither timers nor a function that finalises gradients. Evaluation
    before and after the schedule is not measured."""
    first, second = read_steps(directory / "bare")
    for step in (first, second):
        assert (measured_ms(step) > 0).all()
    (schedule_ms,) = second["measured"]["schedule_ms"][0]
    assert schedule_ms >= second["figures"]["busiest_rank_ms_measured"]
    assert len(one_rank["bare"]["figures"]) == 2
    spans = read_steps(directory / "bare", 0)[-1]["spans"]
    assert len(spans) == 2 * 8
    assert all(0 <= start < end <= schedule_ms for *_, start, end, _ in spans)


def test_megatron_training_is_never_loaded(
    one_rank: dict[str, Any], two_ranks: dict[str, Any]
) -> None:
    assert one_rank["loaded"] == two_ranks["loaded"] == []


def test_a_failure_of_one_rank_fails_all_of_them(two_ranks: dict[str, Any]) -> None:
    assert "end_step: ranks 1 have a problem of their own to report" in two_ranks["one rank only"]


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ("step ended twice", "IntegrationError: end_step after 0 forward steps, expected 8"),
        ("half a step", "IntegrationError: end_step after 4 forward steps, expected 8"),
        ("step never ended", "end_step was not called for step 0"),
        ("budgets left behind", "8 of 8 forward steps never reached the plugin's attention"),
        ("loss of two values", "the loss function returned 2 values"),
        ("resumed within a step", "StateError: the checkpoint has consumed 3 samples, no multiple"),
        ("nothing to save", "StateError: nothing to save"),
        ("resumed elsewhere", "consumed_samples 8: the loaded state goes on after 16 samples"),
        ("state of other data", "StateError: --data-path: the training samples are not those"),
        ("state after the iterator", "load_state_dict: call it before train_data_iterator"),
        ("attention dropout", "ConfigError: --sparse-balance with --attention-dropout 0.1"),
        ("loss per micro-batch", "regrouping needs --calculate-per-token-loss"),
        ("dry run", "--sparse-balance-dry-run 0: not for a trainer with its own loop"),
        (
            "segments without a pipeline",
            "--sparse-balance-max-segments 2 with --pipeline-model-par",
        ),
        ("dense evaluation", "--sparse-balance-eval-attention dense: not for a trainer with its"),
        ("another device", "--sparse-balance-device cuda: not for a trainer with its own loop"),
        ("no such data", "DataError: /nonexistent/prefix.idx: no such file"),
        ("uneven batch", "--global-batch-size 8 must be a multiple of --micro-batch-size 3"),
    ],
)
def test_a_mistake_is_told(mistake: str, message: str, one_rank: dict[str, Any]) -> None:
    assert message in one_rank["bare"]["mistakes"][mistake]
