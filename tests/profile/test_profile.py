# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance profile`` on a tiny model, and its measuring plan."""

import subprocess
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from forked_ranks import run_alone
from harness import (
    MODEL_FLAGS,
    PROGRAMS,
    TIMEOUT_S,
    TRAINING_FLAGS,
    python_environment,
    run_program,
    run_training,
)
from step_cases import SHAPE

from sparsebalance_megatron.config import DEFAULT_SELECTION, SparseBalanceConfig
from sparsebalance_megatron.cost.fit import fit_cost_model
from sparsebalance_megatron.cost.parts import NEVER_TIMED, OF_EVERY_MODEL, Direction, Part
from sparsebalance_megatron.cost.table import CostTable, RunIdentity
from sparsebalance_megatron.cost.work_model import features
from sparsebalance_megatron.profile.cells import (
    FULL,
    QUICK,
    Cell,
    Thoroughness,
    Timed,
    measure,
    plan_cells,
)

BLOCK_SIZE = 16
BALANCE_FLAGS = (
    "--sparse-balance",
    *("--sparse-balance-block-size", str(BLOCK_SIZE), "--sparse-balance-base-budget", "4"),
)
PROFILE = ("-m", "sparsebalance_megatron.cli", "profile", "--quick", "-o")
IDENTITY = RunIdentity(
    device="cpu", dtype="float32", block_size=BLOCK_SIZE, selection=DEFAULT_SELECTION, shape=SHAPE
)


def run_profile(output: Path, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The command as a user runs it, on a machine without a GPU."""
    return run_program((*PROFILE, str(output), "--", *flags), output.parents[1])


@pytest.mark.parametrize(
    ("selection", "layer_budgets"), [(DEFAULT_SELECTION, ()), ("vertical-slash", ("dense:3",))]
)
def test_a_tiny_model_gives_a_table_that_fits_and_predicts(
    selection: str, layer_budgets: tuple[str, ...], tmp_path: Path
) -> None:
    """Dense attention is measured whatever layers the model has."""
    output = tmp_path / "new" / "table.json"
    selects = ["--sparse-balance-selection", selection, "--sparse-balance-max-segments", "3"]
    selects += ["--sparse-balance-config", "segment-tokens=32"]
    selects += ["--sparse-balance-layer-budgets", *layer_budgets] if layer_budgets else []
    process = run_profile(output, [*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, *selects])
    assert process.returncode == 0, process.stderr[-4000:]
    assert f"{output}: " in process.stdout
    assert "attention  backward  median" in process.stdout
    assert [entry.name for entry in output.parent.iterdir()] == ["table.json"]

    table = CostTable.load(output)
    table.check_matches(vars(replace(IDENTITY, selection=selection)))
    # Of three blocks, one is read as columns where columns are selected.
    budgets = {row.budget_blocks or 0 for row in table.rows if row.part is Part.ATTENTION}
    assert max(budgets) >= 3
    assert (table.threads, table.exchanges, table.dense_kernel) == (1, (), "torch")
    assert set(table.versions) == {"sparsebalance-megatron", "megatron-core", "torch"}
    model = fit_cost_model(table)
    assert table.segments is not None and model.segments.slowness >= 1.0
    assert {row.part for row in table.rows} == set(OF_EVERY_MODEL)
    short, long = (features([tokens], 4, BLOCK_SIZE, model.work) for tokens in (64, 4096))
    assert model.ms_per_unit.keys() | NEVER_TIMED == {*product(OF_EVERY_MODEL, Direction)}
    for timed in model.ms_per_unit:
        before, after = np.stack([short, long]) @ model.coefficients_ms(*timed)
        assert 0.0 < before <= after, timed


def test_the_faster_kernel_of_whole_documents_is_measured(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    program = (str(PROGRAMS / "profile_kernels.py"), "--quick", "-o", str(output), "--")
    flags = [*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS]
    flags += ["--sparse-balance-selection", "previous-block"]
    process = run_program((*program, *flags), tmp_path)
    assert process.returncode == 0, process.stderr[-4000:]
    table = CostTable.load(output)
    assert table.list_kernel == table.dense_kernel == "fa4"
    for part in (Part.DENSE_ATTENTION, Part.ATTENTION):
        rows = [row for row in table.rows if row.part is part]
        measured = {(row.lengths_tokens, row.budget_blocks, row.direction) for row in rows}
        assert len(measured) == len(rows) > 0


def test_parallel_flags_give_one_ranks_share(tmp_path: Path) -> None:
    """The flags of a job of eight ranks, profiled by one process; training's outputs stay away."""
    output = tmp_path / "table.json"
    parallel = (
        *("--tensor-model-parallel-size", "2", "--sequence-parallel", "--bf16"),
        *("--pipeline-model-parallel-size", "2", "--num-layers-per-virtual-pipeline-stage", "1"),
        *("--use-distributed-optimizer", "--recompute-granularity", "full"),
        *("--recompute-method", "uniform", "--recompute-num-layers", "1"),
        *("--save", str(tmp_path / "checkpoints"), "--tensorboard-dir", str(tmp_path / "board")),
    )
    process = run_profile(output, [*MODEL_FLAGS, *TRAINING_FLAGS, *BALANCE_FLAGS, *parallel])
    assert process.returncode == 0, process.stderr[-4000:]
    shape = replace(IDENTITY.shape, tensor_parallel_size=2)
    run = replace(IDENTITY, dtype="bfloat16", shape=shape)
    CostTable.load(output).check_matches(vars(run))
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


@pytest.mark.distributed
def test_two_ranks_measure_what_sharing_a_row_takes(tmp_path: Path) -> None:
    output = tmp_path / "table.json"
    run = run_training(
        2, [*MODEL_FLAGS, *BALANCE_FLAGS], program=(*PROFILE, str(output), "--")
    ).require_success()
    table = CostTable.load(output)
    kv_bytes, gradient_bytes = 2 * 2 * 16 * 4, 2 * 2 * 16 * 4
    # Each rank receives half of a row of 64 tokens, then of one of 256.
    assert [(row.width, row.received_bytes) for row in table.exchanges] == [
        (2, tokens * received // 2)
        for tokens in (64, 256)
        for received in (kv_bytes, kv_bytes + gradient_bytes)
    ]
    assert {row.repeats for row in table.exchanges} == {QUICK.most_repeats}
    model = fit_cost_model(table)
    per_byte = [row.ms_median / row.received_bytes for row in table.exchanges]
    assert min(per_byte) * (1 - 1e-5) <= model.exchange.ms_per_byte <= max(per_byte) * (1 + 1e-5)
    # One rank says it, and measures the model besides.
    assert run.output.count("sequences shared by 2 ranks: each receives ") == 1
    assert {row.part for row in table.rows} == set(OF_EVERY_MODEL)


def test_ranks_that_cannot_share_rows_are_refused(tmp_path: Path) -> None:
    process = run_alone(
        [*PROFILE, str(tmp_path / "table.json"), "--", *MODEL_FLAGS, *BALANCE_FLAGS],
        environment=python_environment() | {"RANK": "0", "WORLD_SIZE": "3"},
        folder=tmp_path,
        timeout_s=TIMEOUT_S,
    )
    assert process.returncode == 2
    assert "sparse-balance profile with 3 ranks: " in process.stderr


def test_wrong_flags_are_one_line_and_write_nothing(tmp_path: Path) -> None:
    """Flags that only Megatron's model can judge; tests/bad_inputs has others."""
    flags = (*MODEL_FLAGS, *BALANCE_FLAGS, "--tensor-model-parallel-size", "3")
    process = run_profile(tmp_path / "table.json", flags)
    assert process.returncode == 2
    message = "--num-attention-heads 4 is no multiple of --tensor-model-parallel-size 3"
    assert f"sparse-balance: error: {message}" in process.stderr.replace("profile: ", "")
    assert "Traceback" not in process.stderr
    assert not (tmp_path / "table.json").exists()


@pytest.mark.parametrize("thoroughness", [QUICK, FULL])
@pytest.mark.parametrize("longest_tokens", [100, 8192, 131072])
def test_the_plan_times_every_part_on_rows_short_to_long(
    thoroughness: Thoroughness, longest_tokens: int
) -> None:
    config = SparseBalanceConfig(block_size=128, base_budget=8)
    cells = plan_cells(longest_tokens, config, thoroughness)
    rows = [cell.lengths_tokens for cell in cells]
    assert rows == sorted(rows, key=sum)
    assert all(min(row) >= 1 and sum(row) <= longest_tokens for row in rows)
    assert len(set(cells)) == len(cells)
    for part in OF_EVERY_MODEL:
        timed = [cell.lengths_tokens for cell in cells if cell.part is part]
        if part is Part.DENSE_ATTENTION:
            assert len(timed) == len(set(timed)) > 0
        else:
            assert set(timed) == set(rows)
            assert part is Part.ATTENTION or len(timed) == len(set(timed))
    if longest_tokens >= 8192:
        assert any(len(row) > 1 for row in rows)
        assert len({cell.budget_blocks for cell in cells}) >= 4


class _ScriptedClock:
    """Every span lasts as long as the script says."""

    def __init__(self, spans_ms: Sequence[float]) -> None:
        self._spans_ms = iter(spans_ms)

    def mark(self) -> None:
        return None

    def elapsed_ms(self, start: None, end: None) -> float:
        return next(self._spans_ms)


def test_medians_and_spreads_leave_the_warm_up_out() -> None:
    ran = []
    timed = Timed(
        forward=lambda: ran.append("forward") or "output",
        backward=lambda output: ran.append(f"backward of {output}"),
    )
    cell = Cell(Part.ATTENTION, (7, 9), 2)
    clock = _ScriptedClock([1000, 2000, 1, 10, 2, 20, 6, 60])
    at_once = replace(QUICK, warm_up=1, least_repeats=3, most_repeats=5, seconds_per_cell=0.0)
    forward, backward = measure(timed, cell, at_once, clock)
    assert ran == ["forward", "backward of output"] * 4
    assert (forward.direction, backward.direction) == (Direction.FORWARD, Direction.BACKWARD)
    assert (forward.ms_median, forward.ms_spread, forward.repeats) == (2.0, 1.0, 3)
    assert (backward.ms_median, backward.ms_spread, backward.repeats) == (20.0, 10.0, 3)
    assert (forward.lengths_tokens, forward.budget_blocks) == ((7, 9), 2)
    # A part without gradient has no backward and no budget.
    timed = Timed(forward=lambda: None, backward=None)
    clock, slowly = _ScriptedClock([1.0] * 6), replace(at_once, seconds_per_cell=10.0)
    (row,) = measure(timed, Cell(Part.ROUTER, (7,), 2), slowly, clock)
    assert (row.direction, row.budget_blocks, row.repeats) == (Direction.FORWARD, None, 5)
