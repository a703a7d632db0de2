# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance plan`` from the command line: rows, flags that vary, widths, whose times."""

import json
from pathlib import Path
from typing import Any

import pytest
from cost.cost_cases import measured
from harness import write_documents
from predict.predict_cases import SHAPE

from sparsebalance_megatron import cli
from sparsebalance_megatron.convert.hf_config import read_config
from sparsebalance_megatron.convert.megatron_model import model_flags
from sparsebalance_megatron.convert.megatron_model import words as flag_words
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import RunIdentity

CONFIG = {
    **{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864},
    **{"num_attention_heads": 14, "num_key_value_heads": 2, "num_hidden_layers": 24},
    **{"vocab_size": 151936, "max_position_embeddings": 4096, "tie_word_embeddings": True},
}
STEP = ("--global-batch-size", "8", "--pipeline-model-parallel-size", "2")
SPARSE = (*STEP, "--sparse-balance-dense-up-to", "0", "--sparse-balance-base-budget", "4")
Captured = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("torch_without_cpu_adapter")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with lengths and a model."""
    monkeypatch.chdir(tmp_path)
    Path("lengths.json").write_text(json.dumps([400 * (1 + i % 13) for i in range(40)]))
    Path("model").mkdir()
    Path("model/config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def plan(*words: str, flags: tuple[str, ...] = STEP, steps: str = "2") -> int:
    own = ("--gpus", "4", "--lengths", "lengths.json", "--model", "model", "--steps", steps)
    return cli.main(["plan", *own, *words, "--", *flags])


def found(capsys: Captured, *words: str, flags: tuple[str, ...] = STEP) -> dict[str, Any]:
    assert plan("--json", *words, flags=flags) == 0
    return json.loads(capsys.readouterr().out)


def test_rows_of_one_job(capsys: Captured) -> None:
    printed = found(capsys)
    rows = ["Megatron", "sorted", "exact", "fixed budgets", "paper", "default"]
    assert list(printed["rows"]) == rows
    assert (printed["steps"], printed["given"], printed["device"]) == (2, "default", "H200")
    assert printed["rows"]["Megatron"]["speedup"] == 1.0
    exact = printed["rows"]["exact"]
    least, most = exact["speedup_spread"]
    assert least <= exact["speedup"] <= most, "of two steps"
    assert 0.0 < exact["utilisation"] < 0.58, "no more than attention is counted at"
    assert printed["dense"] in ("sorted", "exact")


@pytest.mark.parametrize("columns", ["40", "80"])
def test_screens_are_as_narrow_as_the_terminal(
    columns: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    for vary in ((), ("--vary", "tensor-model-parallel-size 1 2")):
        assert plan(*vary, flags=SPARSE) == 0
        lines = capsys.readouterr().out.splitlines()
        words = " ".join(" ".join(lines).split())
        # Flags and models' sentences are not broken within a word.
        assert all(len(line) <= int(columns) or " " not in line.strip() for line in lines)
        assert "H200" in words and "Memory: " in words


def test_mode_exact_speaks_of_no_budgets(capsys: Captured) -> None:
    flags = (*STEP, "--sparse-balance-mode", "exact")
    assert plan(flags=flags) == 0
    shown = capsys.readouterr().out
    assert not [word for word in ("budget", "cover-", "lists") if word in shown]
    printed = found(capsys, "--vary", "tensor-model-parallel-size 1 2", flags=flags)
    assert printed["rows"].keys() == {
        f"{n} {way}" for n in "12" for way in ("as given", "Megatron")
    }
    assert {row["dense_tokens_share"] for row in printed["rows"].values()} == {1.0}
    assert printed["given"].endswith("as given")


def test_flags_that_vary_are_one_table(capsys: Captured) -> None:
    vary = ("--vary", "tensor-model-parallel-size 1 2 3", "--vary", "use-distributed-optimizer")
    own = ("--sparse-balance-base-budget", "4")
    printed = found(capsys, *vary, flags=(*STEP, *own))
    rows = printed["rows"]
    assert rows.keys() == {
        f"{tensor} {optimizer} {way}"
        for tensor in "12"
        for optimizer in ("no", "yes")
        for way in ("as given", "exact", "Megatron")
    }
    ms = {name: row["makespan_ms"] for name, row in rows.items()}
    assert list(ms.values()) == sorted(ms.values())
    given_ms, dense_ms = ms[printed["given"]], ms[printed["dense"]]
    assert given_ms == min(ms[name] for name in ms if "given" in name)
    assert dense_ms == min(ms[name] for name in ms if "exact" in name)
    reasons = printed["left_out"]
    optimizer = "--use-distributed-optimizer"
    alone = "--tensor-model-parallel-size 3"
    assert set(reasons) == {alone, f"{alone} {optimizer}"}
    assert all("world size (4) is not divisible" in why for why in reasons.values())
    # What it names can be predicted, and launched, as it stands.
    fastest, dense = printed["fastest"], printed["fastest_dense"]
    assert fastest[-1] in ("1", "2", "--use-distributed-optimizer")
    alone = found(capsys, flags=tuple(fastest))
    assert alone["rows"]["default"]["makespan_ms"] == pytest.approx(given_ms)
    alone = found(capsys, flags=tuple(dense))
    assert alone["given"] == "exact"
    assert alone["rows"]["exact"]["makespan_ms"] == pytest.approx(dense_ms)


def test_flags_without_effect_in_a_mode_make_no_row(capsys: Captured) -> None:
    """The base budget is nothing in mode exact: two of four combinations are one row."""
    modes = "sparse-balance-mode exact default"
    vary = ("--vary", "sparse-balance-base-budget 4 8", "--vary", modes)
    printed = found(capsys, *vary, flags=STEP)
    given = {name for name in printed["rows"] if name.endswith("as given")}
    assert given == {"- exact as given", "4 default as given", "8 default as given"}
    assert printed["left_out"] == {}


def test_layouts_that_do_not_fit_are_marked_and_not_planned(capsys: Captured, folder: Path) -> None:
    large = {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 29568}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8}
    (folder / "model/config.json").write_text(json.dumps(CONFIG | large | heads))
    recompute = ("--recompute-granularity", "full", "--recompute-method", "uniform")
    recompute += ("--recompute-num-layers", "1", "--tensor-model-parallel-size", "4")
    flags = ("--global-batch-size", "32", "--seq-length", "65536", *recompute)
    own = ("--gpus", "64", "--model", "model", "--lengths", "lengths.json")
    words = ["plan", *own, "--steps", "1"]
    vary = ("--vary", "pipeline-model-parallel-size 1 8")
    assert cli.main([*words, *vary, "--json", "--", *flags]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {(name, row["fits"], "makespan_ms" in row) for name, row in rows.items()} == {
        *((f"8 {way}", True, True) for way in ("as given", "exact", "Megatron")),
        *((f"1 {way}", False, False) for way in ("as given", "exact", "Megatron")),
    }
    assert all(name.startswith("8") for name in list(rows)[:3])
    assert cli.main([*words, "--vary", "pipeline-model-parallel-size 1", "--", *flags]) == 0
    assert "Fastest" not in capsys.readouterr().out, "nothing fits"
    assert cli.main([*words, *vary, "--", *flags]) == 0
    output = capsys.readouterr().out
    for row in rows.values():
        assert f" {row['at_most_gib']:,.1f}{'' if row['fits'] else '*'}\n" in output
    assert cli.main([*words, "--", *flags]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "does not fit the 140 GiB of the H200. Raise --tensor-model-parallel-size" in output
    assert "--sequence-parallel" in output


def test_a_model_is_the_flags_that_convert_writes(capsys: Captured, folder: Path) -> None:
    model = read_config(folder / "model")
    words = flag_words(model_flags(model))
    expected = found(capsys)
    assert expected["flags"] == [*words, *STEP, "--sparse-balance"]
    own = ("--gpus", "4", "--lengths", "lengths.json", "--steps", "2", "--json")
    assert cli.main(["plan", *own, "--", *words, *STEP]) == 0
    again = json.loads(capsys.readouterr().out)
    for rows in (expected["rows"], again["rows"]):
        for row in rows.values():
            del row["plan_ms"]
    assert again == expected


def test_a_blend_is_planned_from_idx_files_alone(capsys: Captured) -> None:
    words = []
    for weight, name in (("0.7", "web"), ("0.3", "books")):
        words += [weight, str(write_documents(Path(name), [300, 500, 900] * 8))]
        Path(f"{name}.bin").unlink()
    own = ("--gpus", "4", "--model", "model", "--steps", "2", "--json")
    data = ("--seq-length", "1024", "--split", "100,0,0", "--data-path", *words)
    assert cli.main(["plan", *own, "--", *STEP, *data]) == 0
    assert json.loads(capsys.readouterr().out)["steps"] == 2


def test_a_cost_table_brings_its_times_and_its_device(capsys: Captured, folder: Path) -> None:
    step_ms, device = [], "NVIDIA H100 80GB HBM3"
    identity = RunIdentity(
        device=device, dtype="float32", block_size=256, selection="token-query-head", shape=SHAPE
    )
    for slowness in (1.0, 3.0):
        table = folder / f"table{slowness}.json"
        cost = CostModel.analytic(SHAPE, 256)
        measured_costs = measured(cost, identity, [[512], [2048], [8192]], slowness=slowness)
        table.write_text(measured_costs.text())
        flags = (*SPARSE, "--sparse-balance-cost-table", str(table))
        printed = found(capsys, flags=flags)
        assert (printed["device"], printed["memory_gib"]) == (device, 80.0)
        step_ms.append(printed["rows"]["fixed budgets"]["makespan_ms"])
    assert step_ms[1] == pytest.approx(3 * step_ms[0], rel=0.05)
    assert plan(flags=(*flags, "--sparse-balance-block-size", "512")) == 2
    assert "block_size is 256 in the table, 512 in this run" in capsys.readouterr().err


def test_no_flag_at_all_has_a_name(capsys: Captured) -> None:
    assert plan("--vary", "sparse-balance", flags=STEP) == 0
    assert "Fastest: none of these flags: " in " ".join(capsys.readouterr().out.split())
