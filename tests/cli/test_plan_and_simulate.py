# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance plan`` and ``simulate`` from the command line: JSON keys, tables, errors."""

from __future__ import annotations

import json

import pytest
from cost.cost_cases import measured
from harness import long_tailed_lengths, write_documents

from sparsebalance_megatron import cli
from sparsebalance_megatron.cost.table import RunIdentity
from sparsebalance_megatron.predict.models import MODELS, counted_cost

KEYS = {
    "makespan_ms",
    "speedup",
    "bound_ratio",
    "imbalance_microbatch",
    "imbalance_rank",
    "coverage_mean",
    "coverage_min_drop",
    "work_ratio",
    "plan_ms",
}


@pytest.fixture
def lengths(tmp_path):
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps([400 * (1 + i % 13) for i in range(40)]))
    return str(path)


def plan(lengths, *more):
    sizes = ("--dp", "2", "--pp", "2", "--micro-batches", "4", "--model", "qwen2.5-0.5b")
    return cli.main(["plan", "--lengths", lengths, *sizes, *more])


def test_plan_json(lengths, capsys):
    assert plan(lengths, "--json", "--steps", "3") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["steps"] == 3
    assert {"baseline", "SAB+DST", "ours"} < set(found["variants"])
    for variant in found["variants"].values():
        assert set(variant) > KEYS
    assert found["variants"]["baseline"]["speedup"] == 1.0
    assert found["variants"]["ours"]["speedup"] > 1.0


def test_plan_table_fits_eighty_columns(lengths, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert plan(lengths, "--global-batch", "16") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    names = ("ours, fixed budgets", "ours, shortest", "dense, balanced")
    assert all(any(line.startswith(name) for line in lines) for name in names)


def test_simulate_prints_the_papers_rows_in_80_columns(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert cli.main(["simulate", "--setup", "paper-ablation", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert not any("…" in line for line in lines)
    rows = [line.split()[0] for line in lines if line and line[0] in "b+LSo"]
    assert {"baseline", "+DST", "+SAB", "+LBB", "LBB+DST", "SAB+DST", "ours"} <= set(rows)


def test_layers_with_budgets_of_their_own(lengths, capsys):
    """A model whose layers are all dense loses no coverage, and takes longer at equal rates."""
    found = {}
    alike = ("--json", "--steps", "1", "--dense-efficiency", "0.3", "--sparse-efficiency", "0.3")
    for layers in ("dense:0-23", "8:0 dense:1"):
        assert plan(lengths, *alike, "--layer-budgets", *layers.split()) == 0
        found[layers] = json.loads(capsys.readouterr().out)["variants"]["ours"]
    assert found["dense:0-23"]["coverage_mean"] == found["dense:0-23"]["work_ratio"] == 1.0
    assert found["dense:0-23"]["makespan_ms"] > found["8:0 dense:1"]["makespan_ms"]
    assert plan(lengths, "--layer-budgets", "dense:24") == 2
    assert "--layer-budgets dense:24: names layer 24" in capsys.readouterr().err
    setup = ("simulate", "--setup", "paper-ablation", "--steps", "1", "--layer-budgets")
    assert cli.main([*setup, "dense:99"]) == 2
    assert "--layer-budgets dense:99: names layer 99" in capsys.readouterr().err


def test_means_of_coverage_are_held_over_what_the_flag_names(lengths, capsys):
    found = {}
    few = ("--json", "--steps", "5", "--base-budget", "4")
    for mean_over in ("samples", "tokens", "length-buckets"):
        assert plan(lengths, *few, "--coverage-mean-over", mean_over) == 0
        found[mean_over] = json.loads(capsys.readouterr().out)["variants"]["ours, shortest"]
    assert len({outcome["makespan_ms"] for outcome in found.values()}) == 3


def test_selections_are_counted_at_their_own_rates(lengths, capsys):
    found = {}
    for name in ("token-query-head", "previous-block"):
        assert plan(lengths, "--json", "--steps", "1", "--selection", name) == 0
        found[name] = json.loads(capsys.readouterr().out)
        assert f"counted operations of {name} on H200" in found[name]["header"]
    first, second = (each["variants"] for each in found.values())
    assert first["ours"]["makespan_ms"] > second["ours"]["makespan_ms"]
    assert first["dense"]["makespan_ms"] == second["dense"]["makespan_ms"]
    assert plan(lengths, "--selection", "nobody") == 2
    assert "nobody" in capsys.readouterr().err


def test_segments_add_a_row(lengths, capsys):
    pipeline = ("--pp", "2", "--max-segments", "4", "--segment-tokens", "256")
    assert plan(lengths, "--json", "--steps", "1", *pipeline) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["variants"]
    assert rows["ours-segments"]["makespan_ms"] <= rows["ours"]["makespan_ms"]
    assert sum(found["layers_per_stage"]) == MODELS["qwen2.5-0.5b"].layers
    assert plan(lengths, "--steps", "1", *pipeline) == 0
    assert "--pipeline-model-parallel-layout" in capsys.readouterr().out


def test_rows_of_shared_micro_batches(lengths, capsys):
    shared = ("--dp", "4", "--context-parallel-size", "2", "--gigabytes-per-second", "100")
    assert plan(lengths, "--json", "--steps", "1", "--global-batch", "16", *shared) == 0
    found = json.loads(capsys.readouterr().out)["variants"]
    rows = {"baseline-cp", "ours-static-cp", "ours-dynamic-cp"}
    assert rows < set(found)
    assert all(set(found[row]) > KEYS for row in rows)
    assert found["ours-dynamic-cp"]["speedup"] >= found["ours-static-cp"]["speedup"]
    assert found["ours-static-cp"]["speedup"] > found["baseline-cp"]["speedup"] > 1.0


def test_stored_documents_are_planned_in_the_order_of_training(tmp_path, capsys):
    """A blend without .bin files is planned as a file with the lengths of its order."""
    from sparsebalance_megatron.data.blend import parse_blend
    from sparsebalance_megatron.data.samples import open_samples

    words = []
    for seed, (weight, name) in enumerate([("0.7", "web"), ("0.3", "books")]):
        documents = long_tailed_lengths(25, longest=4000, seed=seed)
        words += [weight, str(write_documents(tmp_path / name, documents, seed=seed))]
    trained = open_samples(
        parse_blend(words, "--data-path"),
        "train",
        max_tokens=1024,
        overlong="split",
        seed=1234,
        split_weights="100,0,0",
    )
    in_order = trained.lengths_of(trained.global_batch(0, 16)).tolist()
    for name in ("web", "books"):
        (tmp_path / f"{name}.bin").unlink()
    (tmp_path / "lengths.json").write_text(json.dumps(in_order))
    sizes = ("--dp", "2", "--pp", "2", "--micro-batches", "4", "--steps", "2", "--json")
    chosen = ("--model", "qwen3-0.6b", "--batching", "length", "--tuning", "off")
    found = []
    for given in (
        ("--data-path", *words, "--seq-length", "1024"),
        ("--lengths", str(tmp_path / "lengths.json")),
    ):
        assert cli.main(["plan", *given, *sizes, *chosen]) == 0
        result = json.loads(capsys.readouterr().out)
        for variant in result["variants"].values():
            del variant["plan_ms"]
        assert result.pop("header").startswith("2 steps, recompute none, order ")
        found.append(result)
    assert found[0] == found[1]
    assert found[0]["costs"].startswith("qwen3-0.6b: counted operations")


def test_simulate_on_stored_documents_and_a_directory(tmp_path, capsys):
    prefix = write_documents(tmp_path / "web", long_tailed_lengths(40, longest=4000))
    config = {
        **{"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4},
        **{"num_hidden_layers": 4, "vocab_size": 1000},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    given = ("--data-path", str(prefix), "--model", str(tmp_path), "--steps", "1", "--json")
    assert cli.main(["simulate", "--setup", "paper-ablation", *given]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["data"]) == {str(prefix)}
    config["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert cli.main(["simulate", "--setup", "paper-ablation", *given]) == 2
    assert "--pp 4: the model has 3 layers" in capsys.readouterr().err


LAST_QUERIES = "--selection vertical-slash-last-queries"


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--fsdp", "--pp 2: "),
        ("--fsdp --pp 1 --ep 2 --model qwen3-30b-a3b", "--ep 2: "),
        (f"{LAST_QUERIES} --max-segments 4", "last-queries with --max-segments 4: "),
        (f"{LAST_QUERIES} --cp 2", "last-queries with --cp 2: "),
        ("--model qwen3-30b-a3b --moe-router-topk 129", "--moe-router-topk 129: "),
        ("--model qwen3-30b-a3b --num-experts 4", "--moe-router-topk 8: "),
    ],
)
def test_what_training_refuses_is_not_predicted(lengths, capsys, flags, complaint):
    assert plan(lengths, *flags.split(), "--steps", "1") == 2
    assert complaint in " ".join(capsys.readouterr().err.split())


def test_simulate_takes_other_lengths(lengths, capsys):
    setup = ("simulate", "--setup", "lockstep-chatqa2", "--steps", "1", "--rows", "ours", "--json")
    names = {}
    for given in ((), ("--lengths-from", "prolong"), ("--lengths", lengths)):
        assert cli.main([*setup, *given]) == (2 if "--lengths" in given else 0)
        printed = capsys.readouterr()
        names[given] = list(json.loads(printed.out)["data"]) if printed.out else printed.err
    assert list(names.values())[:2] == [["chatqa2"], ["prolong"]]
    assert "40 lengths, and a step needs --global-batch 64" in names["--lengths", lengths]


def test_flags_that_contradict_the_cost_table_are_refused(lengths, tmp_path, capsys):
    model = MODELS["qwen2.5-0.5b"]
    identity = RunIdentity(
        **{"device": "cpu", "dtype": "bfloat16", "block_size": 256},
        **{"selection": "token-query-head", "shape": model.shape},
    )
    table = str(tmp_path / "table.json")
    measured(counted_cost(model, block_size=256), identity, [[512], [4096]]).save(table)
    sizes = ("--dp", "2", "--pp", "2", "--micro-batches", "4", "--layers", "24", "--json")
    command = ("plan", "--lengths", lengths, *sizes, "--steps", "1", "--cost-table", table)
    assert cli.main([*command]) == 0
    assert cli.main([*command, "--tp", "8", "--block-size", "512"]) == 2
    error = capsys.readouterr().err
    assert "block_size is 256 in the table, 512 in this run" in error
    assert "tensor_parallel_size is 1 in the table, 8 in this run" in error


@pytest.mark.parametrize("columns", ["40", "60", "80"])
def test_narrow_tables_cut_no_number(lengths, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    assert plan(lengths, "--steps", "1", "--batching", "length", "--tuning", "off") == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= int(columns)
    assert "…" not in printed
    assert {"speedup", "coverage"} <= set(printed.split())
