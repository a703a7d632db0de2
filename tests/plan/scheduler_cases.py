# SPDX-License-Identifier: Apache-2.0
"""Real samples and schedulers over them; ``index`` is a fixture."""

from __future__ import annotations

import itertools
from concurrent.futures import Executor
from typing import Any

import pytest
from harness import long_tailed_lengths, write_documents
from plan.plan_cases import cost_model, job_shape, policy

from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.scheduler import Scheduler

LONGEST_TOKENS = 2048
BLOCK_TOKENS = 64
JOB = job_shape(2, 2, stages=2)
GLOBAL_BATCH = 8


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    lengths = long_tailed_lengths(100, longest=LONGEST_TOKENS)
    prefix = write_documents(tmp_path_factory.mktemp("scheduler") / "train", lengths)
    found = SampleIndex.open(prefix, max_tokens=LONGEST_TOKENS, overlong="split", seed=1)
    assert found is not None
    return found


def scheduler(
    index: SampleIndex,
    worker: Executor | None,
    global_batch_size: int = GLOBAL_BATCH,
    **choices: Any,
) -> Scheduler:
    ticks = itertools.count()
    return Scheduler(
        job=JOB,
        policy=policy(block_size=BLOCK_TOKENS, base_budget=6, **choices),
        cost=cost_model(BLOCK_TOKENS),
        coverage=CoverageCurves(JOB.layers, LONGEST_TOKENS // BLOCK_TOKENS, 0.5),
        index=index,
        global_batch_size=global_batch_size,
        calibrate="measured",
        clock=lambda: float(next(ticks)),
        worker=worker,
    )
