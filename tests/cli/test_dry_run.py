# SPDX-License-Identifier: Apache-2.0
"""A dry run plans what training would plan, for ranks that do not exist, and prints it."""

import re
import subprocess
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from cost.cost_cases import measured
from harness import BALANCE_FLAGS, MODEL_FLAGS, TRAINING_FLAGS, run_program, run_training
from plan import plan_cases
from step_cases import SHAPE

from sparsebalance_megatron.cli import dry_run
from sparsebalance_megatron.config import DEFAULT_SELECTION
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.table import RunIdentity
from sparsebalance_megatron.learn.planned_step import PlannedStep
from sparsebalance_megatron.learn.step_planner import StepPlanner
from sparsebalance_megatron.pretrain_gpt import main
from sparsebalance_megatron.text_table import shown_ms

FLAGS = (*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS)
_ROW = re.compile(r" +[\d-]+( +[\d.,e+-]+){7}")


def start(directory: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """The training command in an empty directory, as one process, with no variable of torchrun."""
    return run_program(("-m", "sparsebalance_megatron.pretrain_gpt", *flags), directory)


def micro_batches(output: str) -> list[list[str]]:
    """The rows of the printed table."""
    return [line.split() for line in output.splitlines() if _ROW.fullmatch(line)]


def test_plans_for_ranks_that_do_not_exist_and_writes_nothing(
    documents: Path, tmp_path: Path
) -> None:
    layout = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "4")
    writing = ("--tensorboard-dir", "tb", "--save", "ckpt", "--save-interval", "2")
    flags = (*FLAGS, *layout, *writing, "--sparse-balance-log-dir", "log")
    result = start(
        tmp_path, *flags, "--data-path", str(documents), "--sparse-balance-dry-run", "32"
    )
    assert result.returncode == 0, result.stderr
    assert "dry run of 32 ranks: tensor 2 x pipeline 4 x data 4" in result.stdout
    assert "layers per pipeline stage: 1 1 1 1" in result.stdout
    assert "not checked:\n  whether memory suffices: it is counted, not tried" in result.stdout
    assert "32 GPUs, 20 steps of 8 samples, order of training with seed 1234." in result.stdout
    assert "on H200" in result.stdout
    names = ["Megatron", "sorted", "exact", "fixed budgets", "paper", "default"]
    assert table_rows(result.stdout)[:6] == names
    for word in ("gloo", "deprecated", "cpu-init"):
        assert word not in result.stdout, "of the process that stands for all ranks"
    assert re.findall(r"^  stages? ([\d-]+): [\d.e-]+ = ", result.stdout, re.M) == ["0", "1-2", "3"]
    rows = micro_batches(result.stdout)
    assert [row[:2] for row in rows] == [[str(d), str(m)] for d in range(4) for m in range(2)]
    assert sum(int(row[2]) for row in rows) == 8
    assert {tuple(row[4:7]) for row in rows} == {("4", "4.0", "4")}
    assert list(tmp_path.iterdir()) == []


def table_rows(output: str) -> list[str]:
    """Names of the ways to plan, in their order."""
    return re.findall(r"^(\w[\w ]*?) +[\d.,]+ +[\d.,]+ +\d+% +[\d.]+", output, re.M)


def test_a_table_of_another_device_and_ranks_of_a_group_are_named(
    documents: Path, tmp_path: Path
) -> None:
    of = {"dtype": "float32", "block_size": 16, "selection": DEFAULT_SELECTION, "shape": SHAPE}
    identity = RunIdentity(device="NVIDIA H200", **of)
    model, table = CostModel.analytic(SHAPE, block_size=16), tmp_path / "table.json"
    # As much slower as no measurement of less than a clock's resolution shows.
    lengths = [[16], [64], [200], [256]]
    table.write_text(measured(model, identity, lengths, budgets=(4,), slowness=1e3).text())
    flags = (*FLAGS, "--data-path", str(documents), "--sparse-balance-cost-table", str(table))
    context = ("--context-parallel-size", "2", "--sparse-balance-config", "context-parallel=static")
    result = start(tmp_path, *flags, *context, "--sparse-balance-dry-run", "4")
    assert result.returncode == 0, result.stderr
    assert "measurements of 2026-01-31 on NVIDIA H200" in result.stdout
    assert "dry run of 4 ranks: tensor 1 x pipeline 1 x context 2 x data 2;" in result.stdout
    places = [row[:2] for row in micro_batches(result.stdout)]
    assert sorted(places) == [[ranks, str(m)] for ranks in ("0-1", "2-3") for m in range(4)]
    other = start(tmp_path, *flags, "--hidden-size", "128", "--sparse-balance-dry-run", "4")
    assert other.returncode == 2
    assert "hidden_size" in other.stderr


EXPERT_FLAGS = (
    *("--num-experts", "8", "--moe-router-topk", "2", "--moe-ffn-hidden-size", "32"),
    *("--moe-token-dispatcher-type", "alltoall"),
)


@pytest.mark.parametrize("experts", [(), EXPERT_FLAGS])
def test_plan_predicts_what_a_dry_run_does(
    experts: tuple[str, ...], documents: Path, tmp_path: Path
) -> None:
    """To the digit."""
    own = ("--expert-model-parallel-size", "2") if experts else ()
    flags = (*FLAGS, *experts, *own, "--data-path", str(documents))
    dry = start(tmp_path, *flags, "--sparse-balance-dry-run", "4")
    assert dry.returncode == 0, dry.stderr
    assert ("every expert is taken to get as many tokens" in dry.stdout) == bool(experts)
    command = ("-m", "sparsebalance_megatron.cli", "plan", "--gpus", "4", "--", *flags)
    planned = run_program(command, tmp_path)
    assert planned.returncode == 0, planned.stderr
    both = [
        [line for line in output.splitlines() if table_rows(line)]
        for output in (dry.stdout, planned.stdout)
    ]
    assert both[0] == both[1] and len(both[0]) > 5


@pytest.mark.distributed
def test_the_plan_is_the_one_that_training_starts_with(documents: Path, tmp_path: Path) -> None:
    flags = (*FLAGS, "--data-path", str(documents), "--train-iters", "1")
    trained = run_training(2, flags, log_dir=tmp_path).require_success()
    dry = run_training(2, (*flags, "--sparse-balance-dry-run")).require_success()
    (step,) = trained.steps
    predicted: dict[str, Any] = step["predicted"]
    (first_line,) = {line for line in dry.output.splitlines() if "dry run of" in line}
    assert "dry run of 2 ranks: tensor 1 x pipeline 1 x data 2" in first_line
    assert f"placement: {step['batching']}" in dry.output
    least = predicted["makespan_ms"] / predicted["lower_bound_ms"]
    shown = f"step: {shown_ms(predicted['makespan_ms'])} ms on H200, {least:.3f} times the least"
    assert shown in dry.output
    assert sum(int(row[3].replace(",", "")) for row in micro_batches(dry.output)) == step["tokens"]
    assert "iteration        1/" not in dry.output


def test_sequences_beyond_the_models_positions_are_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 40960}')
    beyond = {
        "seq_length": 131072,
        "tokenizer_model": str(tmp_path),
        "position_embedding_type": "rope",
        "use_rope_scaling": False,
        "rotary_seq_len_interpolation_factor": None,
    }
    (told,) = dry_run._positions(Namespace(**beyond))
    assert "--seq-length 131,072 is beyond the 40,960 of " in told
    for name, value in {
        "seq_length": 40960,
        "position_embedding_type": "yarn",
        "use_rope_scaling": True,
        "rotary_seq_len_interpolation_factor": 4,
        "tokenizer_model": None,
    }.items():
        assert dry_run._positions(Namespace(**beyond | {name: value})) == ()


def test_a_dry_run_without_the_plugin_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--num-layers", "2", "--sparse-balance-dry-run", "8"])
    assert "there is no plan; add --sparse-balance" in capsys.readouterr().err


ROUTER = "--sparse-balance-config router=torch --sparse-balance-selection vertical-slash"


@pytest.mark.parametrize(
    ("flags", "reason", "ranks"),
    [
        ("--attention-dropout 0.1", "use --attention-dropout 0", ""),
        ("--sparse-balance-log-dir /proc/x", "/proc/x", "2"),
        ("--pipeline-model-parallel-size 3", "Megatron refuses the flags (", "3"),
        (ROUTER, "leaves no choice of router", ""),
    ],
)
def test_what_would_stop_training_is_one_line(
    flags: str, reason: str, ranks: str, documents: Path, tmp_path: Path
) -> None:
    """Training says the same; it is not started where the ranks do not exist."""
    given = (*FLAGS, "--data-path", str(documents), *flags.split())
    dry = start(tmp_path, *given, "--sparse-balance-dry-run", *ranks)
    (line,) = (line for line in dry.stderr.splitlines() if "sparse balance: error:" in line)
    assert reason in line
    trained = dry if ranks else start(tmp_path, *given)
    assert line in trained.stderr.splitlines()
    assert dry.returncode == trained.returncode == 2
    assert "Traceback" not in dry.stderr + trained.stderr


def planned(
    ranks: int, micro_batches: int, lengths: list[int], *, stages: int = 1, **plan_settings: Any
) -> PlannedStep:
    job = plan_cases.job_shape(ranks, micro_batches, stages=stages)
    planner = StepPlanner(
        job=job,
        plan_settings=plan_cases.plan_settings(**plan_settings),
        cost=plan_cases.cost_model(),
        coverage=plan_cases.coverage_curves(job.layers),
    )
    return planner.plan(0, lengths, job, planner.knowledge())


def test_of_many_ranks_the_slowest_and_fastest_are_shown_and_the_rest_counted() -> None:
    lengths = [100 + 37 * number for number in range(64)]
    step = planned(32, 2, lengths, batching="arrival", tuning="off")
    _, *rows, remark = dry_run._micro_batches(step)
    assert len(rows) == 16
    ms = [float(row.split()[-1]) for row in rows]
    assert ms == sorted(ms, reverse=True)
    assert "16 ranks between the 8 slowest and the 8 fastest are left out" in remark
    assert rows[0].split()[0] == "31"


def test_segments_are_counted_where_a_step_has_them() -> None:
    step = planned(1, 2, [2**17, 3000], stages=4, max_segments=8, segment_tokens=4096)
    header, *rows = dry_run._micro_batches(step)
    column = header.split().index("segments")
    segments = [each.segments for each in step.plan.micro_batches]
    assert max(segments) == 8
    assert [int(row.split()[column]) for row in rows] == segments
