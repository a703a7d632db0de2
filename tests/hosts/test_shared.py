# SPDX-License-Identifier: Apache-2.0
"""Schedules of shared micro-batches keep what NeMo-RL and verl ask of them; verl's rows are cut."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hosts.host_cases import FakeRun, load, load_beside
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import SHAPE

from sparsebalance_megatron import SparseBalanceConfig, integration

JOB = integration.HostJob(
    layout=integration.Job(stage_layers=(((0, 1),),), data_parallel_size=1),
    shape=SHAPE,
    max_sample_tokens=1,
    global_batch_size=1,
)
CONFIG = SparseBalanceConfig(block_size=16, base_budget=2, plan_ms=1.0, tuning="off")
CAP = 64
SAMPLES = st.lists(st.integers(2, 4 * CAP), min_size=4, max_size=24)


@dataclass
class Assignment:
    """A task of NeMo-RL, as far as it is touched."""

    sample_indices: tuple[int, ...]
    lane_start: int
    cp_size: int
    pad_multiple: int
    padded_tokens: int


@pytest.mark.filterwarnings("ignore:no --sparse-balance-cost-table")
@settings(max_examples=10)
@given(lengths=SAMPLES, parallel=st.sampled_from([1, 2]))
def test_nemo_rl_gets_every_sample_once_on_aligned_lanes_under_its_budget(
    lengths: list[int], parallel: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        types = {"CPAssignment": Assignment, "CPSyncGroup": list}
        adapter = load_beside(
            patch, "shared_schedule", {"nemo_rl.distributed.dynamic_context_parallel": types}
        )
        sizes = {"lanes": 4, "min_size": 1, "max_size": 4, "tokens_per_rank": CAP + 16}
        padding = {"sequence_parallel_size": parallel, "user_pad_multiple": 1}
        plan = adapter.cp_phases(CONFIG, JOB)
        groups = plan(lengths, **sizes, **padding)
        assert plan([], **sizes, **padding) == ()
    for tasks in groups:
        lanes = [
            lane
            for task in tasks
            for lane in range(task.lane_start, task.lane_start + task.cp_size)
        ]
        assert sorted(lanes) == [0, 1, 2, 3]
        assert all(task.lane_start % task.cp_size == 0 for task in tasks)
        for task in tasks:
            chunks = 2 * task.cp_size if task.cp_size > 1 else 1
            padded = [
                -(-lengths[i] // task.pad_multiple) * task.pad_multiple for i in task.sample_indices
            ]
            assert task.pad_multiple == chunks * parallel
            assert task.padded_tokens == sum(padded) <= (CAP + 16) * task.cp_size
    placed = chain(*(task.sample_indices for tasks in groups for task in tasks))
    assert sorted(placed) == list(range(len(lengths)))


@pytest.mark.filterwarnings("ignore:no --sparse-balance-cost-table")
@settings(max_examples=10)
@given(lengths=SAMPLES, ranks=st.sampled_from([(4, 1), (2, 2), (2, 3)]))
def test_megatrons_scheduler_gives_contiguous_aligned_members(
    lengths: list[int], ranks: tuple[int, int]
) -> None:
    data, context = ranks
    lengths = [min(length, CAP * (2 if data * context == 6 else 4)) for length in lengths] + [3] * 2
    schedule = load("shared_schedule").Scheduler(CONFIG, JOB)
    made = schedule(max_seqlen_per_dp_cp_rank=CAP, cp_size=context, dp_size=data)
    ids = range(10, 10 + len(lengths))
    groups = made.get_groups_and_subsamples(list(zip(ids, lengths, strict=True)))
    seen = []
    for ranks_of in groups:
        assert len(ranks_of) == data * context
        for sample_ids in {tuple(each) for each in ranks_of}:
            members = [rank for rank, each in enumerate(ranks_of) if tuple(each) == sample_ids]
            assert members == list(range(members[0], members[0] + len(members)))
            assert members[0] % len(members) == 0
            assert sum(lengths[i - 10] for i in sample_ids) <= CAP * len(members)
            seen += sample_ids
    assert sorted(seen) == list(ids)


class Rows(FakeRun):
    """A run of two ranks, of which this has every second token."""

    def cut(self, planned: Any, position: int, values: Any) -> Any:
        self.calls.append(("slice", planned, position))
        cut = {name: value[::2] for name, value in values.items()}
        return cut | {"position_ids": torch.zeros(len(cut["values"]))}

    def whole(self, planned: Any, position: int, values: Any) -> Any:
        self.calls.append(("whole", planned, position))
        return {name: value.repeat_interleave(2, 0)[:-1] for name, value in values.items()}

    def attach(self, planned: Any, position: int, **how: Any) -> str:
        self.calls.append(("attach", planned, position, how["learn"]))
        return "carried"


def test_verls_rows_are_cut_and_put_together_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two micro-batches on a last stage, one pass each over inputs, labels and two outputs."""
    stubs = {"preprocess_thd_engine": "own", "postprocess_thd_engine": "own"}
    verl = load_beside(monkeypatch, "verl_shared", {"verl.models.mcore.model_forward": stubs})
    run, forward = Rows(), verl.model_forward
    samples = [torch.tensor([1, 2, 3]), torch.tensor([4, 5])]
    nested = torch.nested.nested_tensor(samples, layout=torch.jagged)
    with verl.shared_micro_batches(run, SimpleNamespace(planned="plan"), ["model"], learn=True):
        for _ in range(2):
            inputs, carrier, places = forward.preprocess_thd_engine(nested, local_cp_size=2)
            assert (inputs.tolist(), carrier, places.shape) == ([[1, 3, 5]], "carried", (1, 3))
            labels, *_ = forward.preprocess_thd_engine(nested, need_roll=True)
            assert labels.tolist() == [[2, 1, 4]]
            for _ in range(2):
                whole = forward.postprocess_thd_engine(inputs, carrier, nested, 2)
                assert [part.tolist() for part in whole.unbind()] == [[1, 1, 3], [3, 5]]
        assert forward.preprocess_thd_engine(nested, pre_process=False)[0] is nested
    assert forward.preprocess_thd_engine == forward.postprocess_thd_engine == "own"
    each = [*(["attach", "slice", "slice", "whole", "whole"])]
    assert [call[0] for call in run.calls] == [*each, *each, "attach"]
    assert [call[2] for call in run.calls] == [0] * 5 + [1] * 5 + [2]
