# SPDX-License-Identifier: Apache-2.0
"""Layouts of jobs: what divides what, and which ranks may share."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sparsebalance_megatron.config import ConfigError, SparseBalanceConfig
from sparsebalance_megatron.plan.job import Job, check_cp_sizes, max_cp_size, whole_parts


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 4))
def test_layers_are_split_as_evenly_as_they_can_be(layers: int, stages: int, ranks: int) -> None:
    if layers < stages:
        with pytest.raises(ConfigError, match=f"{layers} layers only"):
            Job.even(layers=layers, ranks=ranks, stages=stages)
        return
    job = Job.even(layers=layers, ranks=ranks, stages=stages, micro_batches=3)
    parts = [part.tolist() for part in np.array_split(np.arange(layers), stages)]
    assert [list(chunk) for (chunk,) in job.stage_layers] == parts
    assert (job.layers, job.pipeline_stages, job.virtual_stages) == (layers, stages, 1)
    assert job.places == 3 * ranks


def test_samples_divide_or_are_told() -> None:
    parts = {"--dp": 2, "--micro-batches": 3}
    assert [whole_parts(samples, "--global-batch", parts) for samples in (12, 6)] == [2, 1]
    for samples in (0, 3, 13):
        message = f"--global-batch {samples} must be a multiple of --dp 2 x --micro-batches 3 = 6"
        with pytest.raises(ConfigError, match=message):
            whole_parts(samples, "--global-batch", parts)
    with pytest.raises(ConfigError, match="--dp 0 = 0"):
        whole_parts(4, "--global-batch", {"--dp": 0})


@pytest.mark.parametrize(
    ("ranks", "cp_size", "per_node", "most"),
    [
        *((16, 2, 8, 8), (4, 2, 8, 4), (6, 2, 8, 2), (12, 2, 8, 4), (16, 1, 8, 1)),
        *((32, 16, 8, 16), (16, 2, 6, 4), (16, 2, 64, 8), (16, 2, 1, 2)),
    ],
)
def test_ranks_that_may_share_by_default(
    ranks: int, cp_size: int, per_node: int, most: int
) -> None:
    job = replace(Job.even(layers=2, ranks=ranks, stages=1), context_parallel_size=cp_size)
    assert max_cp_size(job, SparseBalanceConfig(), per_node) == most


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((4, 3, 4), "--context-parallel-size 3: must be a power of two"),
        ((6, 4, 4), "--context-parallel-size 4: must be a power of two that divides the 6"),
        ((4, 0, 4), "--context-parallel-size 0"),
        ((4, 2, 8), "--sparse-balance-max-context-parallel 8: must be a power of two"),
        ((4, 4, 2), "--sparse-balance-max-context-parallel 2: must be at least"),
    ],
)
def test_context_parallel_sizes_that_cannot_be(sizes: tuple[int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_cp_sizes(*sizes)
