# SPDX-License-Identifier: Apache-2.0
"""The simulator's order of operations is the one Megatron's schedules really run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from harness import PROGRAMS, train

from sparsebalance_megatron.plan.pipeline.orders import MegatronSchedule

pytestmark = pytest.mark.distributed

MICRO_BATCHES = 8
PROGRAM = (str(PROGRAMS / "observed_order.py"),)


@pytest.mark.parametrize(
    ("stages", "virtual", "group"),
    [
        (2, 2, 3),
        (4, 1, None),
        *(pytest.param(2, n, None, marks=pytest.mark.nightly) for n in (1, 2)),
    ],
)
def test_observed_order_is_the_simulated_order(
    stages: int,
    virtual: int,
    group: int | None,
    documents: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ORDER_DIRECTORY", str(tmp_path))
    layout = ["--pipeline-model-parallel-size", str(stages)]
    if virtual > 1:
        layout += ["--num-layers-per-virtual-pipeline-stage", str(4 // stages // virtual)]
    if group is not None:
        layout += ["--microbatch-group-size-per-virtual-pipeline-stage", str(group)]
    train(stages, documents, *layout, program=PROGRAM).require_success()
    for stage in range(stages):
        observed = json.loads((tmp_path / f"rank{stage}.json").read_text())
        order = MegatronSchedule(group)(stages, MICRO_BATCHES, virtual).by_stage[stage]
        simulated = [(each.direction, each.chunk, each.micro_batch) for each in order]
        assert [event[0] for event in observed] == [direction for direction, _, _ in simulated]
        # Megatron names no backward; the recorder takes their identity from this very order.
        assert [tuple(e) for e in observed if e[0] == "forward"] == [
            operation for operation in simulated if operation[0] == "forward"
        ]
