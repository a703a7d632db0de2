# SPDX-License-Identifier: Apache-2.0
"""The slime adapters: schedules keep slime's promises, ranks attach and learn in slime's order."""

from __future__ import annotations

import sys
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from hosts.host_cases import FakeRun, load
from hypothesis import given, settings
from hypothesis import strategies as st


def arguments(**changes: Any) -> SimpleNamespace:
    values = {
        **{"hidden_size": 16, "num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 8},
        **{"ffn_hidden_size": 64, "vocab_size": 32, "num_layers": 4},
        **{"use_dynamic_batch_size": True, "max_tokens_per_gpu": 100, "micro_batch_size": 1},
        "sparse_balance": {"block_size": 16, "base_budget": 2, "plan_ms": 1.0},
    }
    return SimpleNamespace(**values | changes)


def layout(ranks: int, chunks: int = 1, group: int = 1) -> dict[str, int]:
    return {
        "dp_size": ranks,
        "cp_size": 1,
        "vpp_size": chunks,
        "microbatch_group_size_per_vp_stage": group,
    }


@pytest.mark.filterwarnings("ignore:no --sparse-balance-cost-table")
@settings(max_examples=15)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=8, max_size=40),
    first=st.sampled_from([1, 100, 130]),
    ranks=st.sampled_from([1, 2, 4]),
    chunks=st.sampled_from([1, 2]),
    steps=st.sampled_from([1, 2]),
)
def test_schedules_keep_slimes_promises(
    lengths: list[int], first: int, ranks: int, chunks: int, steps: int
) -> None:
    """Each kept sample once, alike many micro-batches, and the cap but for a sample above it."""
    lengths = [first, *lengths]
    ranks = ranks if chunks == 1 else min(ranks, 2)
    group = 2
    stages = 1 if chunks == 1 else 2
    batch = len(lengths) // steps
    if batch < ranks * (group if chunks > 1 else 1):
        steps, batch = 1, len(lengths)
    partitions, indices, counts, batches = load("slime_schedule").build_dp_schedule(
        arguments(pipeline_model_parallel_size=stages),
        layout(ranks, chunks, group),
        lengths,
        global_batch_size=batch,
        rollout_indices=list(range(len(lengths))),
    )
    assert batches == [batch] * steps
    assert sorted(chain(*partitions)) == list(range(steps * batch))
    assert chunks == 1 or all(count % group == 0 for count in counts)
    for rank, rows in enumerate(indices):
        assert len(rows) == sum(counts)
        assert list(chain(*rows)) == list(range(len(partitions[rank])))
        for row in rows:
            tokens = sum(lengths[partitions[rank][local]] for local in row)
            assert tokens <= 100 or len(row) == 1


class Iterator:
    """slime's DataIterator, as far as it is touched."""

    def __init__(self, rollout: dict[str, Any]) -> None:
        self.rollout_data = rollout
        self.micro_batch_indices = rollout["micro_batch_indices"]
        self.offset = 0


def test_ranks_attach_the_same_plan_in_every_pass_and_learn_once_per_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two steps of two and one micro-batches: log-probabilities of all, then both updates."""

    def get_batch(iterator: Iterator, keys: Any, *others: Any) -> dict[str, Any]:
        iterator.offset += 1
        return {"packed_seq_params": "row"}

    model = SimpleNamespace(get_batch=get_batch)
    for name in ("slime", "slime.backends"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    package = ModuleType("slime.backends.megatron_utils")
    package.model = model
    monkeypatch.setitem(sys.modules, package.__name__, package)
    slime, run = load("slime"), FakeRun()
    slime.RANK.run = run
    slime.install(None)
    rollout = {
        "total_lengths": [5, 6, 7, 8],
        "micro_batch_indices": [[0], [1, 2], [3]],
        "num_microbatches": [2, 1],
    }
    slime.end_step()
    iterator = Iterator(rollout)
    for _ in range(3):
        batch = model.get_batch(iterator, ["tokens"], 128, False)
        assert batch["packed_seq_params"] == "carried row"
    iterator.offset = 0
    for size in (2, 1):
        slime.end_step(None, 0)
        for _ in range(size):
            model.get_batch(iterator, ["tokens", "advantages"])
    slime.end_step()
    first, second = [[5], [6, 7]], [[8]]
    passes = [(f"plan of {first}", 0), (f"plan of {first}", 1), (f"plan of {second}", 0)]
    forward = [("attach", *each, False) for each in passes]
    update = [("attach", *each, True) for each in passes]
    assert run.calls == [
        *(("plan", first), *forward[:2], ("plan", second), forward[2]),
        *(*update[:2], "end", update[2], "end"),
    ]
