# SPDX-License-Identifier: Apache-2.0
"""Training in segments through ``megatron.training`` gives what micro-batches in one piece give."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import CHANGED, EXPERT_PARALLEL_FLAGS, train, write_documents

from sparsebalance_megatron.log.reader import read_run_log

pytestmark = pytest.mark.distributed

FEW_LOGGED_DIGITS_MS = 4e-6
"""Rounding of a chain of segments, each logged in ms with six digits."""
FEW_ROUNDINGS = 1e-5
"""Relative; weights follow sums of float32 in another order for four steps."""
PIPELINE = ("--pipeline-model-parallel-size", "2")


@pytest.mark.parametrize(("ranks", "experts"), [(2, ()), (4, EXPERT_PARALLEL_FLAGS)])
def test_planned_segments_train(ranks: int, experts: tuple[str, ...], tmp_path: Path) -> None:
    """The planner itself cuts micro-batches, and the run learns what one piece learns.

    With experts, two ranks wait for each other in every layer, and cut a position alike.
    """
    documents = write_documents(tmp_path / "train", [250, 230, 240, 245] * 4)
    one, four = (
        train(
            *(ranks, documents, *PIPELINE, *experts, "--sparse-balance-tuning", "off"),
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
        assert (step.segments_RM == step.segments_RM[0]).all()
        if experts:
            # The times of segments are the group's, those of micro-batches each rank's own.
            assert (step.measured.own_2RPVM > 0.0).all()
            continue
        (ms_2PU,) = step.predicted.segment_ms
        first_U = np.cumsum([0, *step.segments_RM[0, :-1]])
        np.testing.assert_allclose(
            np.add.reduceat(ms_2PU, first_U, axis=2),
            step.predicted.times_2RPVM[:, 0, :, 0],
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
