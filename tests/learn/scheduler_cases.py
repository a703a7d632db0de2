# SPDX-License-Identifier: Apache-2.0
"""Real samples and schedulers over them; ``index`` is a fixture."""

from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

import pytest
from data.stored_documents import open_stored
from harness import long_tailed_lengths, write_documents
from plan.plan_cases import cost_model, job_shape, plan_settings

from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.scheduler import BatchSizes, Scheduler
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.job import Job

LONGEST_TOKENS = 2048
BLOCK_TOKENS = 64
JOB = job_shape(2, 2, stages=2)
GLOBAL_BATCH = 8


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SampleIndex:
    lengths = long_tailed_lengths(100, longest=LONGEST_TOKENS)
    prefix = write_documents(tmp_path_factory.mktemp("scheduler") / "train", lengths)
    return open_stored(prefix, max_tokens=LONGEST_TOKENS)


def make_scheduler(
    index: Any,
    worker: Executor | None = None,
    *,
    job: Job = JOB,
    batch_sizes: int | tuple[tuple[int, int], ...] = GLOBAL_BATCH,
    max_blocks: int = LONGEST_TOKENS // BLOCK_TOKENS,
    clock: Callable[[], float] = lambda: 0.0,
    **choices: Any,
) -> Scheduler:
    """A scheduler over an index, with a policy of these choices."""
    schedule = ((0, batch_sizes),) if isinstance(batch_sizes, int) else batch_sizes
    sizes = BatchSizes(schedule=schedule)
    planner = StepPlanner(
        job=job,
        plan_settings=plan_settings(**{"block_size": BLOCK_TOKENS, "base_budget": 6} | choices),
        cost=cost_model(choices.get("block_size", BLOCK_TOKENS)),
        coverage=CoverageCurves(job.layers, max_blocks, 0.5),
        clock=clock,
    )
    return Scheduler(planner, job=job, index=index, batch_sizes=sizes, worker=worker)
