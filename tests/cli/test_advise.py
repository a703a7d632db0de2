# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance advise`` from the command line: lists, indexes, models on disk, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cost.cost_cases import measured

from sparsebalance_megatron import cli
from sparsebalance_megatron.cost.table import RunIdentity
from sparsebalance_megatron.predict.models import MODELS, counted_cost

JOB = ("--model", "qwen2.5-0.5b", "--gpus", "4", "--pp", "2", "--global-batch", "8")
ONE = ("--block-sizes", "128", "--base-budgets", "8", "--steps", "1")


@pytest.fixture
def lengths(tmp_path: Path) -> Path:
    path = tmp_path / "lengths.txt"
    path.write_text("\n".join(str(400 * (1 + number % 13)) for number in range(40)))
    return path


def test_json(lengths: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = ("--block-sizes", "128", "256", "--base-budgets", "8", "--micro-batches", "2", "4")
    assert cli.main(["advise", "--lengths", str(lengths), *JOB, *grid, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"].startswith("qwen2.5-0.5b: counted operations")
    assert "theoretical_memory_usage" in found["memory"]
    assert sorted(each["choice"]["block_size"] for each in found["choices"]) == [128, 128, 256, 256]
    for each in found["choices"]:
        assert len(each["stages"]) == 2
        assert each["makespan_ms"] > 0 and 0 <= each["bubble_share"] < 1
        assert each["at_most_gib"] > 0
    assert found["left_out"] == [] and found["advice"]
    assert found["header"].startswith("5 steps, recompute none, order as filed; costs: qwen2.5")


def test_dense_layers_take_time_and_no_router(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = {}
    for layers in ((), ("--layer-budgets", "dense:12-23")):
        alike = ("--dense-efficiency", "0.3", "--sparse-efficiency", "0.3")
        words = ["advise", "--lengths", str(lengths), *JOB, *ONE, "--json", *alike, *layers]
        assert cli.main(words) == 0
        (found[layers],) = json.loads(capsys.readouterr().out)["choices"]
    sparse, half_dense = found.values()
    assert half_dense["speedup_over_dense"] < sparse["speedup_over_dense"]
    assert 0 < half_dense["router_share"] < sparse["router_share"]
    # Stage 1 lists blocks for blocks of queries, not for tokens.
    lists_bytes = [each["stages"][1]["lists_bytes"] for each in (sparse, half_dense)]
    assert 0 < lists_bytes[1] < lists_bytes[0] / 10


def test_table_fits_eighty_columns(
    lengths: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["advise", "--lengths", str(lengths), *JOB, *ONE]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "…" not in printed
    joined = " ".join(printed.split())
    assert "Fastest that fits 140 GiB at no less coverage than" in joined
    assert "break-even: sparse attention must reach" in joined
    assert "counted operations of token-query-head on H200" in joined
    assert "stage 1: " in joined


def test_an_index_and_a_model_on_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    harness = pytest.importorskip("harness")
    prefix = harness.write_documents(tmp_path / "train", [300, 5000, 40, 900, 1200, 64, 80, 2000])
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-06,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "vocab_size": 1000,
    }
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    command = ("advise", "--data-path", str(prefix), "--model", str(folder), "--gpus", "4")
    more = ("--global-batch", "8", "--seq-length", "4096", *ONE, "--json")
    assert cli.main([*command, *more]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["costs"].startswith("tiny-llama: ")
    (choice,) = found["choices"]
    assert 0 < choice["dense_tokens_share"] < 1


def save_table(path: Path, *, slowness: float) -> Path:
    """A table for qwen2.5-0.5b with blocks of 512 tokens: counted costs times ``slowness``."""
    model = MODELS["qwen2.5-0.5b"]
    identity = RunIdentity(
        device="a device",
        dtype="bfloat16",
        block_size=512,
        selection="previous-block",
        shape=model.shape,
    )
    cost = counted_cost(model, block_size=512, selection="previous-block")
    measured(cost, identity, [[512], [2048], [8192]], slowness=slowness).save(path)
    return path


def test_a_cost_table_brings_its_times_and_its_block_size(
    lengths: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    step_ms = []
    one = ("--base-budgets", "8", "--steps", "1")
    for slowness in (1.0, 3.0):
        table = save_table(tmp_path / f"table{slowness}.json", slowness=slowness)
        command = ("advise", "--lengths", str(lengths), *JOB, *one, "--json")
        assert cli.main([*command, "--cost-table", str(table)]) == 0
        found = json.loads(capsys.readouterr().out)
        assert "measurements of 2026-01-31 on a device" in found["costs"]
        (choice,) = found["choices"]
        assert choice["choice"]["block_size"] == 512
        step_ms.append(choice["makespan_ms"])
    assert step_ms[1] == pytest.approx(3 * step_ms[0], rel=0.02)
    for other, found in (
        (("--model", "qwen2.5-3b"), "hidden_size is 896 in the table"),
        (("--block-sizes", "128"), "block_size is 512 in the table, 128 in this run"),
    ):
        command = ("advise", "--lengths", str(lengths), *JOB, *one, "--cost-table", str(table))
        assert cli.main([*command, *other]) == 2
        assert found in capsys.readouterr().err


def test_fewer_micro_batches_than_ranks_share(
    lengths: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks that share every sample, and one micro-batch: alone, none would have half of it."""
    job = ("--model", "qwen2.5-0.5b", "--gpus", "4", "--cp", "2", "--global-batch", "8")
    words = ["advise", "--lengths", str(lengths), *job, "--micro-batches", "1", *ONE, "--json"]
    assert cli.main(words) == 0
    (choice,) = json.loads(capsys.readouterr().out)["choices"]
    assert choice["choice"]["micro_batches"] == 1 and choice["makespan_ms"] > 0
