# SPDX-License-Identifier: Apache-2.0
"""One real run on an interleaved pipeline, everything that it logs, and what is drawn of it."""

import itertools
import re
from pathlib import Path

import numpy as np
import pytest
from harness import (
    REPOSITORY,
    TrainingRun,
    assert_order_is_simulated,
    measured_ms,
    read_records,
    read_steps,
    train,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.log.reader import read_run_log

pytestmark = pytest.mark.distributed

STAGES = 2
STEPS = 4
LAYERS = {0: [[0], [2]], 1: [[1], [3]]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module", autouse=True)
def run(documents: Path, directory: Path) -> TrainingRun:
    """Two ranks, one pipeline, two virtual stages each, tuned as the paper does."""
    flags = (
        *("--pipeline-model-parallel-size", str(STAGES)),
        *("--num-layers-per-virtual-pipeline-stage", "1"),
        *("--microbatch-group-size-per-virtual-pipeline-stage", "3"),
        *("--tensorboard-dir", str(directory / "tensorboard")),
        *("--sparse-balance-batching", "length", "--sparse-balance-tuning", "anchor"),
    )
    return train(STAGES, documents, *flags, log_dir=directory).require_success()


def test_step_log_is_whole(directory: Path) -> None:
    log = read_run_log(directory)
    assert log.problems == ()
    assert [step.iteration for step in log.steps] == [1, 2, 3, 4]
    (header,) = read_records(directory / "steps.jsonl", "run")
    assert header["job"]["stage_layers"] == [LAYERS[0], LAYERS[1]]
    assert (header["iterations"], header["device"]) == (STEPS, "cpu")


@pytest.mark.parametrize("rank", range(STAGES))
def test_rank_log_says_what_the_step_log_sums_up(directory: Path, rank: int) -> None:
    (header,) = read_records(directory / "ranks" / f"rank-{rank:05d}.jsonl", "rank")
    assert (header["world_rank"], header["pipeline_rank"]) == (rank, rank)
    assert header["layers"] == LAYERS[rank]
    for step, mine in zip(read_steps(directory), read_steps(directory, rank), strict=True):
        assert mine["iteration"] == step["iteration"]
        entries = mine["micro_batches"]
        assert [entry["position"] for entry in entries] == list(range(8))
        assert len({sample for entry in entries for sample in entry["samples"]}) == 8
        assert all(np.shape(entry["budgets_LS"]) == (2, 1) for entry in entries)
        assert all(0.0 < entry["coverage"][0] <= 1.0 for entry in entries)
        assert mine["schedule_ms"] == step["measured"]["schedule_ms"][0][rank]
        for direction, ms_RPVM in zip(Direction, measured_ms(step), strict=True):
            known = ms_RPVM[0, rank]
            spans = [span for span in mine["spans"] if span[0] == direction]
            assert len(spans) == known.size - np.isnan(known).sum()
            for _, chunk, position, start_ms, end_ms, *_ in spans:
                # Rounded to 1e-4 ms at both ends.
                assert end_ms - start_ms == pytest.approx(known[chunk][position], abs=1.01e-4)


def test_spans_follow_one_another_within_the_schedule(directory: Path) -> None:
    for rank in range(STAGES):
        for mine in read_steps(directory, rank)[1:]:
            assert len(mine["spans"]) == 2 * 2 * 8
            for before, after in itertools.pairwise(mine["spans"]):
                assert before[4] <= after[3] + 1.01e-4
            assert mine["spans"][0][3] >= 0.0
            assert mine["spans"][-1][4] <= mine["schedule_ms"] + 1.01e-4


def test_coverage_of_the_ranks_makes_that_of_the_step(directory: Path) -> None:
    logs = [read_steps(directory, rank) for rank in range(STAGES)]
    for step, *mine in zip(read_steps(directory), *logs, strict=True):
        entries = [entry for rank in mine for entry in rank["micro_batches"]]
        coverage = [value for entry in entries for value in entry["coverage"]]
        assert np.mean(coverage) == pytest.approx(step["figures"]["coverage"], abs=1e-5)


def test_tensorboard_has_every_documented_scalar(directory: Path, run: TrainingRun) -> None:
    events = EventAccumulator(str(directory / "tensorboard")).Reload()
    page = (REPOSITORY / "docs" / "TELEMETRY.md").read_text(encoding="utf-8")
    documented = documented_scalars(page)
    assert documented
    for name in documented:
        assert events.Scalars(f"sparse-balance/{name}"), name
    from_log_line = {"imbalance", "predicted-to-measured", "coverage", "tuned-samples"}
    written = {
        tag.removeprefix("sparse-balance/")
        for tag in events.Tags()["scalars"]
        if tag.startswith("sparse-balance/") and not tag.endswith(" vs samples")
    }
    assert written == documented | from_log_line
    for name in from_log_line:
        assert f"| sparse-balance/{name}: " in run.output
        assert len(events.Scalars(f"sparse-balance/{name}")) == STEPS
    for name in ("coverage", "coverage-base", "coverage-min"):
        logged = [scalar.value for scalar in events.Scalars(f"sparse-balance/{name}")]
        assert logged == pytest.approx(
            [step["figures"][name.replace("-", "_")] for step in read_steps(directory)], rel=1e-6
        )
    makespans = events.Scalars("sparse-balance/makespan-ms-measured")
    assert [scalar.step for scalar in makespans] == list(range(2, STEPS + 1))
    assert [scalar.value for scalar in makespans] == pytest.approx(
        [max(step["measured"]["schedule_ms"][0]) for step in read_steps(directory)[1:]], rel=1e-6
    )


def documented_scalars(page: str) -> set[str]:
    """Names in the first column of the scalars' table, endings and numbers spelt out."""
    table = page.partition("## Scalars")[2].partition("\n## ")[0]
    names: set[str] = set()
    for row in re.findall(r"^\| (`.+?) \|", table, flags=re.MULTILINE):
        first, *others = re.findall(r"`([^`]+)`", row)
        stem = first.rpartition("-")[0]
        spelt = [first, *(stem + name if name.startswith("-") else name for name in others)]
        for name in spelt:
            if name.endswith("-P"):
                names |= {f"{name[:-1]}{stage}" for stage in range(STAGES)}
            else:
                names.add(name)
    return names


def test_the_schedule_that_ran_is_the_one_that_is_simulated(directory: Path) -> None:
    """With another group size than any layout of test_matrix."""
    assert_order_is_simulated(directory, STAGES)
