# SPDX-License-Identifier: Apache-2.0
"""The adapters of verl, Megatron-Bridge, ms-swift and slime, against stubs of what they touch."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from harness import REPOSITORY
from hosts.host_cases import FakeRun, load, load_beside
from hypothesis import given, settings
from hypothesis import strategies as st


class Model(torch.nn.Module):
    """Gives back the packed parameters that it was called with."""

    def forward(self, packed_seq_params: Any = None) -> Any:
        return packed_seq_params


def begin(run: FakeRun, seen: list[Any]) -> Any:
    def begin_host_run(config: Any, transformer_config: Any, **sizes: Any) -> FakeRun:
        seen.append((config.block_size, sizes))
        return run

    return begin_host_run


PLAN = "plan of [[5, 6], [7]]"


class Rows(dict):
    """A TensorDict of nested input_ids, as far as it is touched."""

    def __init__(self, uids: list[int], lengths: list[int]) -> None:
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        nested = SimpleNamespace(offsets=lambda: offsets)
        super().__init__(uid=torch.tensor(uids), input_ids=nested)


def test_verl_updates_under_the_budgets_of_the_log_probabilities(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three samples in one pass; the update has them in another order and one that was in none."""
    registered: dict[str, Any] = {}

    class Registry:
        @staticmethod
        def register(model_type: str, backend: str, device: str) -> Any:
            return lambda engine: registered.setdefault(backend, engine)

    class Engine:
        def __init__(self) -> None:
            self.engine_config = SimpleNamespace(
                override_transformer_config={"sparse_balance": {"block_size": 64}},
                max_token_len_per_gpu=99,
            )
            self.module = [Model()]

        def _build_tf_config(self) -> None:
            assert "sparse_balance" not in self.engine_config.override_transformer_config
            self.provider = SimpleNamespace(
                vocab_size=8, tensor_model_parallel_size=2, transformer_layer_spec="own spec"
            )

        def get_data_parallel_rank(self) -> int:
            return 0

        def forward_backward_batch(self, data: Any, loss: Any, forward_only: bool = False) -> Any:
            micro_batches, _ = transformer_impl["module"].prepare_micro_batches(data)
            seen = [self.module[0](packed_seq_params="own") for _ in micro_batches]
            return {"seen": seen, "metrics": {}}

    def prepare(data: Any) -> Any:
        return data, None

    transformer_impl: dict[str, Any] = {}
    verl = load_beside(
        monkeypatch,
        "verl",
        {
            "verl.workers.engine.utils": {"prepare_micro_batches": prepare},
            "verl.workers.engine.base": {"EngineRegistry": Registry},
            "verl.workers.engine.megatron.transformer_impl": {
                "prepare_micro_batches": prepare,
                "MegatronEngineWithLMHead": Engine,
            },
        },
    )
    transformer_impl["module"] = verl.transformer_impl
    run, begun = FakeRun(), []
    monkeypatch.setitem(vars(verl.integration), "begin_host_run", begin(run, begun))
    engine = registered["megatron_sparse_balance"]()
    engine._build_tf_config()
    assert begun[0][1]["pad_samples_to"] == 2 and begun[0][1]["scales_own_loss"]
    assert engine.provider.transformer_layer_spec(engine.provider) == "budgeted own spec"
    engine.forward_backward_batch([Rows([1, 2], [5, 6]), Rows([3], [7])], None, forward_only=True)
    output = engine.forward_backward_batch([Rows([3, 9], [7, 4]), Rows([1], [5])], None)
    assert output["seen"] == ["carried own"] * 2
    assert output["metrics"] == {"sparse-balance/coverage": [0.5]}
    update = "plan of [[7, 4], [5]]"
    assert run.calls == [
        *(("plan", [[5, 6], [7]]), ("attach", PLAN, 0, False), ("attach", PLAN, 1, False)),
        ("plan", [[7, 4], [5]], [[7, 0, 5]] * 2),
        *(("attach", update, 0, True), ("attach", update, 1, True), "end"),
    ]
    assert verl.transformer_impl.prepare_micro_batches is prepare
    assert not engine.module[0]._forward_pre_hooks


def test_the_installed_verl_takes_the_engine() -> None:
    """verl itself, in a process of its own: it imports Ray, and leaves much behind."""
    script = (
        "import hosts.verl as adapter\n"
        "from verl.workers.engine.base import EngineRegistry as registry\n"
        "engine = registry._engines['language_model']['megatron_sparse_balance']['cuda']\n"
        "assert engine is adapter.SparseBalanceEngine\n"
    )
    if importlib.util.find_spec("verl") is None:
        pytest.skip("verl is not installed")
    elsewhere = [entry for entry in sys.path if entry and not Path(entry, "hosts").is_dir()]
    path = os.pathsep.join((str(REPOSITORY / "examples"), *elsewhere))
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    last = (done.stderr.splitlines() or [""])[-1]
    if absent := re.match(r"ModuleNotFoundError: No module named '(?!hosts|sparse)(.+)'", last):
        pytest.skip(f"verl needs {absent[1]}, which is not installed")
    assert done.returncode == 0, done.stderr


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
