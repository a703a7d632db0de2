# SPDX-License-Identifier: Apache-2.0
"""The per-step reduction, on real gloo processes."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as multiprocessing

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.megatron.packed_seq_params import CoverageObservation
from sparsebalance_megatron.plan.coverage import budget_grid
from sparsebalance_megatron.plan.measurement import Piece, RankPlace, StepMeasurement, StepTimes
from sparsebalance_megatron.plan.step_plan import JobShape
from sparsebalance_megatron.training.observed_coverage import ObservedCoverage
from sparsebalance_megatron.training.step_reducer import StepReducer

pytestmark = pytest.mark.distributed

GRID = budget_grid(4)
BUCKETS = 3
RANKS = 2
JOB = JobShape(data_parallel_size=RANKS, micro_batches=2, stage_layers=(((0, 1),),))


def seen(rank: int, layer: int) -> tuple[SimpleNamespace, SimpleNamespace]:
    """Two samples of 1 and 4 blocks, then padding that must not count."""
    coverage = 0.5 + 0.1 * rank + 0.01 * layer
    grid_SK = torch.tensor([[1.0] * len(GRID), [coverage] * len(GRID), [math.nan] * len(GRID)])
    observation = CoverageObservation(
        grid_SK=grid_SK,
        executed_S=torch.tensor([1.0, coverage, math.nan]),
        base_S=torch.tensor([1.0, coverage + 0.05, math.nan]),
        grown_S=torch.tensor([False, rank == 1, True]),
    )
    micro_batch = SimpleNamespace(position=layer, plan=SimpleNamespace(samples=(7, 8)))
    layout = packed_layout((0, 5, 69, 72), 16, "cpu")
    return micro_batch, SimpleNamespace(observations={layer: observation}, layout=layout)


def reduce_on_rank(rank: int, directory: str, digests: tuple[bytes, bytes]) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{directory}/rendezvous", rank=rank, world_size=RANKS
    )
    place = RankPlace(
        data_parallel_rank=rank,
        pipeline_rank=0,
        tensor_parallel_rank=0,
        world_rank=rank,
        world_size=RANKS,
    )
    reducer = StepReducer(
        JOB,
        place,
        buckets=BUCKETS,
        grid_size=len(GRID),
        group=None,
        device=torch.device("cpu"),
    )
    measured = reducer.reduce(
        times=StepTimes(
            forward_VM=np.array([[1.0 + rank, math.nan if rank else 2.0]]),
            backward_VM=np.array([[10.0 + rank, 20.0 + rank]]),
            schedule_ms=40.0 + rank,
            start_unix_s=None,
            spans=(),
        ),
        observed=ObservedCoverage.gather(seen(rank, layer) for layer in (0, 1)),
        loss_and_tokens=torch.tensor([6.0 * (rank + 1), 3.0]),
        digest=digests[rank],
    )
    torch.save(measured, f"{directory}/rank{rank}.pt")
    torch.distributed.destroy_process_group()


def run(directory: Path, digests: tuple[bytes, bytes]) -> list[StepMeasurement]:
    multiprocessing.spawn(reduce_on_rank, (str(directory), digests), nprocs=RANKS)
    return [torch.load(directory / f"rank{r}.pt", weights_only=False) for r in range(RANKS)]


def test_all_ranks_learn_the_same_sums(tmp_path: Path) -> None:
    first, second = run(tmp_path, (b"same digest", b"same digest"))
    np.testing.assert_array_equal(first.forward_ms, second.forward_ms)
    np.testing.assert_array_equal(first.forward_ms, [[[[1.0, 2.0]]], [[[2.0, math.nan]]]])
    np.testing.assert_array_equal(first.backward_ms, [[[[10.0, 20.0]]], [[[11.0, 21.0]]]])
    np.testing.assert_array_equal(first.schedule_ms, [[40.0], [41.0]])
    assert first.lm_loss == 3.0
    assert first.tokens == 6
    assert first.digest_mismatches == 0
    coverage = first.coverage
    np.testing.assert_array_equal(coverage.counts_LU, [[2, 0, 2], [2, 0, 2]])
    np.testing.assert_allclose(coverage.sums_LUK[:, 0], 2.0)
    np.testing.assert_allclose(coverage.sums_LUK[0, 2], 0.5 + 0.6, rtol=1e-6)
    np.testing.assert_allclose(coverage.sums_LUK[1, 2], 0.51 + 0.61, rtol=1e-6)
    np.testing.assert_allclose(coverage.executed_L, [2 + 0.5 + 0.6, 2 + 0.51 + 0.61], rtol=1e-6)
    assert coverage.count == 8
    assert coverage.executed_sum == pytest.approx(4 + 0.5 + 0.6 + 0.51 + 0.61)
    assert coverage.base_sum == pytest.approx(coverage.executed_sum + 4 * 0.05)
    assert coverage.minimum == pytest.approx(0.5)
    assert coverage.grown == 2


def test_a_differing_plan_is_counted_on_every_rank(tmp_path: Path) -> None:
    measurements = run(tmp_path, (b"one digest", b"another digest"))
    assert [measured.digest_mismatches for measured in measurements] == [1, 1]


def test_observations_keep_their_place_without_padding() -> None:
    observed = ObservedCoverage.gather(seen(1, layer) for layer in (0, 1))
    assert observed.pieces == (Piece(0, 0, 2), Piece(1, 1, 2))
    np.testing.assert_array_equal(observed.group_O(BUCKETS), [0, 2, BUCKETS, BUCKETS + 2])
    np.testing.assert_allclose(
        observed.executed_and_grown(), [[1.0, 0], [0.6, 1], [1.0, 0], [0.61, 1]], rtol=1e-6
    )
    nothing = ObservedCoverage.gather([])
    assert nothing.executed_and_grown().shape == (0, 2)
    assert nothing.group_O(BUCKETS).shape == (0,)
