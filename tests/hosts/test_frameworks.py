# SPDX-License-Identifier: Apache-2.0
"""The adapters of verl, Megatron-Bridge and ms-swift, against stubs of exactly what they touch."""

from __future__ import annotations

import importlib.util
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
