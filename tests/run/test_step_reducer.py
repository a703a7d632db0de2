# SPDX-License-Identifier: Apache-2.0
"""The per-step reduction, on real gloo processes."""

import math
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import PROGRAMS, run_training
from programs.reducing_rank import BUCKETS, GRID, RANKS, observed_micro_batch, seen

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.sequence.slice import SequenceGroup
from sparsebalance_megatron.learn.measurement import Piece, RankPlace, StepMeasurement, StepTimes
from sparsebalance_megatron.megatron.packed_seq_params import LocalMicroBatch
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.run.step_reducer import ObservedCoverage, StepReducer


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every rank learnt, with one plan on all ranks and with plans of their own."""
    directory = tmp_path_factory.mktemp("reduced")
    program = (str(PROGRAMS / "reducing_rank.py"), str(directory))
    run_training(RANKS, (), program=program).require_success()
    return directory


def measurements(directory: Path, name: str) -> list[StepMeasurement]:
    paths = [directory / f"{name}-rank{rank}.pt" for rank in range(RANKS)]
    return [torch.load(path, weights_only=False) for path in paths]


@pytest.mark.distributed
def test_all_ranks_learn_the_same_sums(directory: Path) -> None:
    first, second = measurements(directory, "same")
    np.testing.assert_array_equal(first.times_2RPVM[0], second.times_2RPVM[0])
    np.testing.assert_array_equal(first.times_2RPVM[0], [[[[1.0, 2.0]]], [[[2.0, math.nan]]]])
    np.testing.assert_array_equal(first.times_2RPVM[1], [[[[10.0, 20.0]]], [[[11.0, 21.0]]]])
    np.testing.assert_array_equal(first.own_2RPVM[0], [[[[1.0, 2.0]]], [[[1.5, math.nan]]]])
    np.testing.assert_array_equal(first.own_2RPVM[1], [[[[4.0, 16.0]]], [[[11.0, 17.0]]]])
    np.testing.assert_array_equal(first.own_2RPVM, second.own_2RPVM)
    np.testing.assert_array_equal(first.schedule_ms, [[40.0], [41.0]])
    assert first.lm_loss == 3.0
    assert first.tokens == 6
    assert first.differing_ranks == ()
    coverage = first.coverage
    np.testing.assert_array_equal(coverage.counts_LU, [[2, 0, 2], [2, 0, 2]])
    np.testing.assert_allclose(coverage.sums_LUK[:, 0], 2.0)
    np.testing.assert_allclose(coverage.sums_LUK[0, 2], 0.5 + 0.6, rtol=1e-6)
    np.testing.assert_allclose(coverage.sums_LUK[1, 2], 0.51 + 0.61, rtol=1e-6)
    np.testing.assert_allclose(coverage.executed_L, [2 + 0.5 + 0.6, 2 + 0.51 + 0.61], rtol=1e-6)
    assert coverage.counts_L.sum() == 8
    executed = 4 + 0.5 + 0.6 + 0.51 + 0.61
    assert coverage.base_sum == pytest.approx(executed + 4 * 0.05)
    assert coverage.minimum == pytest.approx(0.5)


@pytest.mark.distributed
def test_a_differing_plan_is_counted_on_every_rank(directory: Path) -> None:
    found = measurements(directory, "own")
    assert [measured.differing_ranks for measured in found] == [(1,), (1,)]


def test_only_the_first_of_the_ranks_that_share_a_row_speaks_of_it() -> None:
    found = [
        ObservedCoverage.gather(
            [
                LocalMicroBatch(
                    observations={0: torch.ones(1, 4)},
                    layout=packed_layout((0, 40), 16, "cpu"),
                    budgets_LS=torch.ones(1, 1, dtype=torch.int32),
                    max_budgets=(1,),
                    observe=True,
                    sequence=SimpleNamespace(
                        ranks=None, group=SequenceGroup(member=member, members=2)
                    ),
                )
            ],
            BUCKETS,
        )
        for member in (0, 1)
    ]
    assert [len(each.pieces) for each in found] == [1, 0]
    assert found[1].values_OC is None


def test_observations_keep_their_place_without_padding() -> None:
    observed = ObservedCoverage.gather((seen(1, layer) for layer in (0, 1)), BUCKETS)
    assert observed.pieces == (Piece(0, 0, 2), Piece(1, 1, 2))
    np.testing.assert_array_equal(observed.group_O, [0, 2, BUCKETS, BUCKETS + 2])
    assert ObservedCoverage.gather([], BUCKETS).group_O.shape == (0,)


def reduced(coverage_SK: list[list[float]], monkeypatch: pytest.MonkeyPatch) -> StepMeasurement:
    """What a job of one rank and one layer learns from one row of documents of 4 blocks."""
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: None)
    observed_SK = torch.tensor(coverage_SK)
    samples = len(coverage_SK)
    seen_SK = torch.cat((observed_SK, observed_SK[:, [2, 1]]), dim=1)
    context = observed_micro_batch(range(0, 64 * samples + 1, 64), {0: seen_SK})
    measured, executed_O = learnt_from(context)
    np.testing.assert_array_equal(executed_O, observed_SK[:, 1])
    return measured


def learnt_from(context: Any) -> tuple[StepMeasurement, np.ndarray]:
    """What a job of one rank and one layer learns from a micro-batch."""
    reducer = StepReducer(
        Job(data_parallel_size=1, micro_batches=1, stage_layers=(((0,),),)),
        RankPlace(
            data_parallel_rank=0,
            pipeline_rank=0,
            tensor_parallel_rank=0,
            world_rank=0,
            world_size=1,
        ),
        buckets=BUCKETS,
        grid_size=len(GRID),
        device=torch.device("cpu"),
    )
    return reducer.reduce(
        segments_M=(1,),
        most_segments=1,
        times=StepTimes(schedule_ms=2.0, start_unix_s=None, spans=()),
        observed=ObservedCoverage.gather([context], BUCKETS),
        loss_and_tokens=None,
        digest=b"digest",
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_document_without_finite_coverage_counts_nowhere(
    bad: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = [0.3, 0.5, 0.75, 1.0], [0.2, 0.4, 0.5, 1.0]
    alone = reduced([first, second], monkeypatch).coverage
    broken = reduced([first, [bad] * 4, second, [0.1, bad, 0.9, 1.0]], monkeypatch).coverage
    assert (alone.unobserved, broken.unobserved) == (0, 2)
    for name, value in asdict(broken).items():
        if name != "unobserved":
            np.testing.assert_array_equal(value, asdict(alone)[name], err_msg=name)
    curves, expected = CoverageCurves(1, 4, 0.9), CoverageCurves(1, 4, 0.9)
    curves.observe(broken.sums_LUK, broken.counts_LU)
    expected.observe(alone.sums_LUK, alone.counts_LU)
    np.testing.assert_array_equal(curves.mean_LUK, expected.mean_LUK)
    nothing = reduced([[bad] * 4], monkeypatch).coverage
    assert (nothing.counts_L.sum(), nothing.unobserved, nothing.minimum) == (0, 1, math.inf)
    curves.observe(nothing.sums_LUK, nothing.counts_LU)
    np.testing.assert_array_equal(curves.mean_LUK, expected.mean_LUK)


def test_documents_that_were_not_routed_have_no_curve_and_count_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda flat: None)
    seen_SK = torch.tensor([[*[torch.nan] * 5, 1.0], [0.25, 0.5, 0.75, 1.0, 0.25, 0.5]])
    context = observed_micro_batch([0, 64, 128], {0: seen_SK})
    coverage = learnt_from(context)[0].coverage
    assert coverage.counts_LU.sum() == 1
    np.testing.assert_allclose(coverage.sums_LUK.sum((0, 1)), [0.25, 0.5, 0.75, 1.0])
    assert coverage.counts_L.sum() == 2
    assert coverage.executed_L.sum() == 0.75 * coverage.counts_L.sum()
    assert (coverage.minimum, coverage.unobserved) == (0.5, 0)
    assert (coverage.base_sum, coverage.base_count) == (0.25, 1)
