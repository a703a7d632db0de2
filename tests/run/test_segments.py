# SPDX-License-Identifier: Apache-2.0
"""Training in segments through ``megatron.training`` gives what micro-batches in one piece give."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CHANGED, PROGRAMS, TrainingRun, train, write_documents

from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.view.report.timeline import predicted_timeline

pytestmark = pytest.mark.distributed

FEW_LOGGED_DIGITS_MS = 4e-6
"""Rounding of a chain of segments, each logged in ms with six digits."""
FEW_ROUNDINGS = 1e-5
"""Relative; weights follow sums of float32 in another order for four steps."""
LAST_PRINTED_DIGIT = 1e-3
"""One unit in the last printed digit of gradient norms."""

PIPELINE = ("--pipeline-model-parallel-size", "2")


EXPERT_PARALLEL = """
    --num-experts 4 --moe-ffn-hidden-size 64 --moe-token-dispatcher-type alltoall
    --moe-aux-loss-coeff 0 --expert-model-parallel-size 2"""


@pytest.mark.parametrize(("ranks", "experts"), [(2, ""), (4, EXPERT_PARALLEL)])
def test_planned_segments_train(ranks: int, experts: str, tmp_path: Path) -> None:
    """The planner itself cuts micro-batches, and the run learns what one piece learns.

    With experts, two ranks wait for each other in every layer, and cut a position alike.
    """
    documents = write_documents(tmp_path / "train", [250, 230, 240, 245] * 4)
    one, four = (
        train(
            *(ranks, documents, *PIPELINE, *experts.split(), "--sparse-balance-tuning", "off"),
            *("--global-batch-size", str(ranks), "--sparse-balance-config", "segment-tokens=32"),
            *("--sparse-balance-max-segments", segments),
            log_dir=tmp_path / segments,
            program=(CHANGED, "free-segments", "--sparse-balance-device", "cpu"),
        ).require_success()
        for segments in ("1", "4")
    )
    assert [step["lm_loss"] for step in four.steps] == pytest.approx(
        [step["lm_loss"] for step in one.steps], rel=FEW_ROUNDINGS
    )
    assert all(max(map(max, step["segments_RM"])) > 1 for step in four.steps)
    for step in read_run_log(tmp_path / "4").steps:
        predicted, found = step.predicted, predicted_timeline(step)
        assert found is not None
        assert found.makespan_ms == pytest.approx(predicted.makespan_ms, abs=FEW_LOGGED_DIGITS_MS)
        assert (step.segments_RM == step.segments_RM[0]).all()
        if experts:
            # The times of segments are the group's, those of micro-batches each rank's own.
            assert (step.times_2RPVM("measured") > 0.0).all()
            continue
        (ms_2PU,) = predicted.segment_ms
        first_U = np.cumsum([0, *step.segments_RM[0, :-1]])
        np.testing.assert_allclose(
            np.add.reduceat(ms_2PU, first_U, axis=2),
            step.times_2RPVM("predicted")[:, 0, :, 0],
            atol=FEW_LOGGED_DIGITS_MS,
        )


def test_planned_steps_that_share_and_cut_train(tmp_path: Path) -> None:
    """One long document in a step of short ones: the planner has ranks share it, in segments."""
    documents = write_documents(tmp_path / "train", [250, 16, 18, 14, 17, 15, 19, 13] * 4)
    both = ("--sparse-balance-max-segments", "4", "--sparse-balance-config", "segment-tokens=32")
    both = (*both, "--sparse-balance-config", "context-parallel=dynamic")
    both = (*both, "--sparse-balance-config", "gigabytes-per-second=10000")
    both = (*both, "--sparse-balance-max-context-parallel", "2")
    one, shared = (
        train(
            *(4, documents, *PIPELINE, "--sparse-balance-tuning", "off"),
            *("--global-batch-size", "4", *flags),
            log_dir=tmp_path / name,
            program=(CHANGED, "free-segments", "--sparse-balance-device", "cpu"),
        ).require_success()
        for name, flags in (("one", ()), ("both", both))
    )
    assert shared.logged("lm_loss") == pytest.approx(one.logged("lm_loss"), rel=FEW_ROUNDINGS)
    assert any((True, True) in forms(step) for step in shared.steps)


def forms(step: dict[str, Any]) -> set[tuple[bool, bool]]:
    """Whether micro-batches of a step are shared, and whether they are cut."""
    return {
        (cp_size > 1, segments > 1)
        for of_rank in zip(step["cp_sizes_RM"], step["segments_RM"], strict=True)
        for cp_size, segments in zip(*of_rank, strict=True)
    }


type Lists = dict[tuple[int, int, int, int], list[int]]


def run_with_lists(
    ranks: int, documents: Path, folder: Path, *flags: str
) -> tuple[TrainingRun, list[Lists]]:
    """A run, and the lists of its first step that each rank left."""
    (folder / "lists").mkdir(parents=True)
    forced = ("--sparse-balance-batching", "arrival", "--sparse-balance-tuning", "off")
    run = train(
        *(ranks, documents, *PIPELINE, *forced, *flags),
        log_dir=folder / "log",
        program=(str(PROGRAMS / "drawn_segments.py"), "--sparse-balance-device", "cpu"),
        environment={"LISTS": str(folder / "lists")},
    ).require_success()
    return run, [pickle.loads(path.read_bytes()) for path in (folder / "lists").iterdir()]


@pytest.fixture(scope="module")
def alone(
    documents: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingRun, list[Lists]]:
    """One rank of two stages, on which initial weights depend."""
    return run_with_lists(2, documents, tmp_path_factory.mktemp("alone"))


@pytest.mark.parametrize("exchange", ["all-gather", "ring"])
def test_shared_and_cut_micro_batches_read_the_lists_of_one_rank(
    exchange: str, alone: tuple[TrainingRun, list[Lists]], documents: Path, tmp_path: Path
) -> None:
    """Two ranks share some micro-batches, cut others, and some are both, by lot."""
    mixed = ("--sparse-balance-max-segments", "4", "--sparse-balance-max-context-parallel", "2")
    mixed = (*mixed, "--sparse-balance-config", f"exchange={exchange}")
    one, expected_lists = alone
    four, found_lists = run_with_lists(4, documents, tmp_path, *mixed)
    expected, found = (
        {name: blocks for of_rank in lists for name, blocks in of_rank.items()}
        for lists in (expected_lists, found_lists)
    )
    assert found.items() >= expected.items()
    # A covered document has lists of all blocks before each where its micro-batch is shared or cut.
    more = {name: blocks for name, blocks in found.items() if name not in expected}
    assert all(sorted(blocks) == list(range(name[2] + 1)) for name, blocks in more.items())
    assert len(found) == sum(map(len, found_lists))
    assert four.logged("lm_loss") == pytest.approx(one.logged("lm_loss"), rel=FEW_ROUNDINGS)
    norms, expected_norms = ([float(norm) for norm in run.grad_norms] for run in (four, one))
    assert norms == pytest.approx(expected_norms, abs=2 * LAST_PRINTED_DIGIT)
    found_forms = [forms(step) for step in four.steps]
    assert max(map(len, found_forms)) >= 3, "shared, cut, or both"
    assert any((True, True) in each for each in found_forms)


@pytest.mark.parametrize("segments", ["1", "4"])
def test_layers_per_stage_are_named_where_the_head_is_heavy(segments: str, tmp_path: Path) -> None:
    documents = write_documents(tmp_path / "train", [250, 230, 240, 245] * 4)
    run = train(
        *(2, documents, *PIPELINE, "--num-layers", "6", "--train-iters", "1"),
        *("--make-vocab-size-divisible-by", "4096", "--sparse-balance-config", "segment-tokens=32"),
        *("--sparse-balance-max-segments", segments),
    ).require_success()
    named = "sparse balance: stages do unequal work: with --pipeline-model-parallel-layout 'Et*"
    assert (named in run.output) == (segments == "4")


@pytest.mark.nightly
def test_a_run_goes_on_with_another_number_of_segments(documents: Path, tmp_path: Path) -> None:
    """Two steps in segments drawn by lot, then two in one piece."""

    def attempt(name: str, segments: str, until: str) -> TrainingRun:
        save = ("--save", str(tmp_path / name), "--save-interval", "2")
        save = (*save, "--ckpt-format", "torch_dist")
        load = ("--load", str(tmp_path / "cut")) if name == "resumed" else ()
        return train(
            *(2, documents, *PIPELINE, *save, *load, "--train-iters", until),
            *("--sparse-balance-batching", "arrival", "--sparse-balance-tuning", "off"),
            *("--sparse-balance-max-segments", segments, "--override-opt-param-scheduler"),
            log_dir=tmp_path / f"{name}-log",
            program=(str(PROGRAMS / "drawn_segments.py"), "--sparse-balance-device", "cpu"),
        ).require_success()

    whole = attempt("whole", "1", "4")
    cut = attempt("cut", "4", "2")
    resumed = attempt("resumed", "1", "4")
    assert max(map(max, cut.steps[0]["segments_RM"])) > 1
    assert [step["iteration"] for step in resumed.steps] == [3, 4]
    assert [step["lm_loss"] for step in resumed.steps] == pytest.approx(
        [step["lm_loss"] for step in whole.steps[2:]], rel=FEW_ROUNDINGS
    )
