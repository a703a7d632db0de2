# SPDX-License-Identifier: Apache-2.0
"""The adapters of verl, Megatron-Bridge and ms-swift, against stubs of exactly what they touch."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from harness import REPOSITORY
from hosts.host_cases import FakeRun, load_beside

BOUNDARIES = {"a": [0, 5, 11], "b": [0, 7]}


class Model(torch.nn.Module):
    """Gives back the packed parameters that it was called with."""

    def forward(self, packed_seq_params: Any = None) -> Any:
        return packed_seq_params


def rows() -> list[dict[str, Any]]:
    return [
        {"name": name, "cu_seqlens_q": torch.tensor([ends], dtype=torch.int32)}
        for name, ends in BOUNDARIES.items()
    ]


def begin(run: FakeRun, seen: list[Any]) -> Any:
    def begin_host_run(config: Any, transformer_config: Any, **sizes: Any) -> FakeRun:
        seen.append((config.block_size, sizes))
        return run

    return begin_host_run


PLAN = "plan of [[5, 6], [7]]"
TRAINED = [("plan", [[5, 6], [7]]), ("attach", PLAN, 0, True), ("attach", PLAN, 1, True)]


def test_megatron_bridge_reads_a_step_ahead_and_learns_at_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forward_step(state: Any, iterator: Any, model: Any, return_plan: bool = False) -> Any:
        row = next(iterator)
        return row["name"], model(packed_seq_params="own")

    bridge = load_beside(
        monkeypatch,
        "megatron_bridge",
        {
            "megatron.bridge.training.callbacks": {"Callback": object},
            "megatron.bridge.training.gpt_step": {"forward_step": forward_step},
            "megatron.core.num_microbatches_calculator": {"get_num_microbatches": lambda: 2},
        },
    )
    run, begun, model = FakeRun(), [], Model()
    monkeypatch.setitem(vars(bridge.integration), "begin_host_run", begin(run, begun))
    config = bridge.SparseBalanceConfig(block_size=64)
    balance = bridge.SparseBalance(config, max_sample_tokens=9, global_batch_size=4)
    provider = SimpleNamespace(pipeline_model_parallel_size=1, vocab_size=8)
    spec = balance.layer_spec(lambda provider: "own spec")
    assert spec(provider) == "budgeted own spec"
    assert begun == [(64, {"vocab_size": 8, "max_sample_tokens": 9, "global_batch_size": 4})]
    data = iter(rows() * 2)
    for _ in range(2):
        outputs = [balance(None, data, model) for _ in range(2)]
        assert outputs == [("a", "carried own"), ("b", "carried own")]
        context = SimpleNamespace(
            user_state={}, state=SimpleNamespace(tensorboard_logger=None, train_state=None)
        )
        balance.on_train_step_end(context)
        assert context.user_state["sparse_balance"] == {"sparse-balance/coverage": 0.5}
    assert run.calls == [*TRAINED, "end"] * 2
    model.eval()
    assert balance(None, iter(rows()), model) == ("a", "own")
    with pytest.raises(ValueError, match="a row without cu_seqlens_q_padded"):
        balance._lengths({})


def test_ms_swift_trains_on_rows_that_it_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trainer:
        args = SimpleNamespace(num_microbatches=2)

        def __init__(self) -> None:
            self.wrapped_models = [Model()]

        def get_batch(self, iterator: Any, vp_stage: Any = None) -> Any:
            row = next(iterator)
            return row | {"packed_seq_params": SimpleNamespace(cu_seqlens_q=row["cu_seqlens_q"])}

        def train_step(self, iterator: Any) -> Any:
            (model,) = self.wrapped_models
            read = [self.get_batch(iterator) for _ in range(2)]
            return [(row["name"], model(packed_seq_params="own")) for row in read], 1.0, True

    class Loader:
        config = SimpleNamespace(padded_vocab_size=8)

        def get_transformer_layer_spec(self, vp_stage: int | None = None) -> Any:
            return "own spec"

    choices = {"config": {"block_size": 64}, "max_sample_tokens": 9, "frozen_weights": True}
    monkeypatch.setenv("SPARSE_BALANCE", json.dumps(choices))
    swift = load_beside(
        monkeypatch,
        "ms_swift",
        {
            "mcore_bridge.model.register": {"ModelLoader": Loader},
            "swift.megatron.trainers.trainer": {"MegatronTrainer": Trainer},
        },
    )
    run, begun = FakeRun(), []
    monkeypatch.setitem(vars(swift.integration), "begin_host_run", begin(run, begun))
    assert Loader().get_transformer_layer_spec() == "budgeted own spec"
    sizes = {"vocab_size": 8, "max_sample_tokens": 9, "frozen_weights": True}
    assert begun == [(64, sizes)]
    trainer = Trainer()
    metrics, *rest = trainer.train_step(iter(rows()))
    assert metrics == [("a", "carried own"), ("b", "carried own")] and rest == [1.0, True]
    assert run.calls == [*TRAINED, "end"]
    assert trainer.get_batch.__func__ is Trainer.get_batch


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
