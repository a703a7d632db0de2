# SPDX-License-Identifier: Apache-2.0
"""Checkpoints with and without the plugin's state, across layouts, and with growing batches.

See also test_failure_drills.
"""

import re
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
from cost.cost_cases import Times
from harness import (
    BALANCE_FLAGS,
    EXPERT_FLAGS,
    FEW_ROUNDINGS,
    MODEL_FLAGS,
    TRAINING_FLAGS,
    TrainingRun,
    assert_same_steps,
    read_steps,
    run_training,
)
from harness import train as train_small_model
from learn.scheduler_cases import GLOBAL_BATCH, make_scheduler
from learn.scheduler_cases import index as index  # a fixture
from megatron.core.dist_checkpointing import load_common_state_dict
from plan.plan_cases import job_shape
from step_cases import step_measurement
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from sparsebalance_megatron.data.samples import SampleIndex
from sparsebalance_megatron.learn.calibration import Calibration
from sparsebalance_megatron.learn.scheduler import Scheduler
from sparsebalance_megatron.learn.step_planner import StateError
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.megatron.compat import megatron_version
from sparsebalance_megatron.megatron.training_arguments import trained_first_blocks
from sparsebalance_megatron.run.agreement import compare_runs

LAYERS = 4


@pytest.mark.nightly
def test_checkpoints_go_from_megatron_to_the_plugin_to_two_ranks_and_back(
    documents: Path, tmp_path: Path
) -> None:
    """Cost corrections are learnt, so timed, but with budgets fixed no loss depends on them."""

    def train(name: str, ranks: int, until: int, load: str | None, *flags: str) -> TrainingRun:
        save = ("--save", str(tmp_path / name), "--save-interval", "2")
        from_ = ("--load", str(tmp_path / load)) if load else ()
        common = (*MODEL_FLAGS, *TRAINING_FLAGS, "--override-opt-param-scheduler", *save, *from_)
        common = (*common, "--ckpt-format", "torch_dist", "--train-iters", str(until))
        log_dir = tmp_path / f"{name}-log" if "--sparse-balance" in flags else None
        return run_training(ranks, (*common, *flags), log_dir=log_dir).require_success()

    plugin = (
        *(*BALANCE_FLAGS, "--sparse-balance-config", "calibration=measured"),
        *("--sparse-balance-tuning", "off", "--data-path", str(documents)),
    )
    train("megatron", 1, 2, None, "--mock-data")
    plugin_run = train("plugin", 1, 4, "megatron", *plugin, "--async-save")
    assert "the checkpoint has no plugin state" in plugin_run.output
    two_ranks = train("two-ranks", 2, 6, "plugin", *plugin)
    one_rank = train("one-rank", 1, 6, "plugin", *plugin)
    back = train("back", 1, 8, "two-ranks", "--mock-data")

    assert "resumed: job shape is" in two_ranks.output
    assert "start afresh" not in two_ranks.output and "starts afresh" not in two_ranks.output
    assert "resumed:" not in one_rank.output
    assert two_ranks.logged("iteration") == [5, 6]
    assert two_ranks.logged("tokens") == one_rank.logged("tokens")
    assert two_ranks.logged("lm_loss") == pytest.approx(one_rank.logged("lm_loss"), FEW_ROUNDINGS)
    assert len(back.losses) == 2


@pytest.mark.distributed
def test_ways_of_main_to_load_change_nothing(documents: Path, tmp_path: Path) -> None:
    """Objects, of which the plugin's state is one, read by every rank; distributions cached.

    Losses are those of the step log: main prints the mean of a run's first two as its second.
    """
    per_rank = "--ckpt-fully-parallel-load-per-rank-objects"
    cache = "--ckpt-pg-tensors-cache-path"
    if megatron_version() < "0.20":
        pytest.skip(f"megatron-core {megatron_version()} has no {per_rank}")
    common = ("--sparse-balance-tuning", "off", "--ckpt-format", "torch_dist")
    common = (*common, "--override-opt-param-scheduler", "--ckpt-fully-parallel-load")
    common = (*common, cache, str(tmp_path / "cache"))

    def train(name: str, until: int, *flags: str) -> TrainingRun:
        flags = (*common, "--train-iters", str(until), *flags)
        return train_small_model(2, documents, *flags, log_dir=tmp_path / name).require_success()

    save = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "2")
    whole = train("whole", 4, *save, "--ckpt-pg-tensors-cache-create")
    load = ("--load", str(tmp_path / "checkpoint"), "--ckpt-step", "2", per_rank)
    resumed = train("resumed", 4, *load)
    assert any((tmp_path / "cache").iterdir())
    assert resumed.logged("iteration") == [3, 4]
    assert resumed.grad_norms == whole.grad_norms[2:]
    for quantity in ("lm_loss", "tokens"):
        assert resumed.logged(quantity) == whole.logged(quantity)[2:], quantity


@pytest.mark.distributed
def test_a_run_goes_on_with_the_first_blocks_of_its_checkpoint(
    documents: Path, tmp_path: Path
) -> None:
    def train(until: int, *flags: str) -> str:
        save = ("--save", str(tmp_path), "--save-interval", "1", "--ckpt-format", "torch_dist")
        load = ("--load", str(tmp_path), "--override-opt-param-scheduler")
        flags = (*save, *load, "--train-iters", str(until), *flags)
        return train_small_model(1, documents, *flags).require_success().output

    said = "--sparse-balance-first-blocks is 0, as in the checkpoint"
    train(1, "--sparse-balance-first-blocks", "0")
    assert said in train(2)
    saved = load_common_state_dict(str(tmp_path / "iter_0000002"))["args"]
    assert trained_first_blocks(saved) == 0
    assert trained_first_blocks(Namespace(sparse_balance=True)) == 0  # a release before the flag
    changed = train(3, "--sparse-balance-first-blocks", "1")
    assert said not in changed
    assert "coverage starts afresh: selection token-query-head measured it" in changed


@pytest.mark.distributed
def test_iterations_are_megatrons_after_a_resume_with_another_batch_size(
    documents: Path, tmp_path: Path
) -> None:
    """Sixteen samples in two steps, then sixteen in one: the third, though samples make it two."""
    log_dir = tmp_path / "log"

    def train(until: int, batch_size: int, *more: str) -> TrainingRun:
        flags = (
            *("--save", str(tmp_path / "checkpoint"), "--save-interval", "2", *more),
            *("--global-batch-size", str(batch_size), "--train-iters", str(until)),
            *("--override-opt-param-scheduler", "--ckpt-format", "torch_dist"),
            *("--tensorboard-dir", str(tmp_path / "tensorboard")),
        )
        return train_small_model(1, documents, *flags, log_dir=log_dir).require_success()

    train(2, 8)
    resumed = train(4, 16, "--load", str(tmp_path / "checkpoint"))
    assert resumed.logged("iteration") == [1, 2, 3, 4]
    assert read_run_log(log_dir).problems == ()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    written = events.Scalars("sparse-balance/coverage-min")
    assert [scalar.step for scalar in written] == [1, 2, 3, 4]
    fresh = train(1, 8)
    assert f"logs of an earlier run are kept in {log_dir / 'earlier' / '1'}" in fresh.output
    assert fresh.logged("iteration") == [1]
    kept = read_run_log(log_dir / "earlier" / "1")
    assert [step.iteration for step in kept.steps] == [1, 2, 3, 4]


@pytest.mark.distributed
def test_growing_batches_are_megatrons_in_every_log_and_resume(
    documents: Path, tmp_path: Path
) -> None:
    sizes, saved = [4, 4, 8, 8, 12], 2
    # In tokens: at 8 and at 24 samples of 256.
    schedule = ("--step-batch-size-schedule", "0:4 2048:8 6144:12")
    line = re.compile(r"iteration +(\d+)/.*?consumed samples: +(\d+) .*?global batch size: +(\d+)")
    at = TRAINING_FLAGS.index("--global-batch-size")

    def train(name: str, *more: str) -> TrainingRun:
        flags = (
            *(*MODEL_FLAGS, *TRAINING_FLAGS[:at], *TRAINING_FLAGS[at + 2 :], *BALANCE_FLAGS),
            *("--data-path", str(documents), *schedule),
            *("--train-iters", str(len(sizes)), "--ckpt-format", "torch_dist"),
            *("--override-opt-param-scheduler", *more),
            *("--tensorboard-dir", str(tmp_path / f"{name}-board")),
        )
        return run_training(2, flags, log_dir=tmp_path / name).require_success()

    checkpoints, log_dir = str(tmp_path / "checkpoints"), tmp_path / "whole"
    whole = train("whole", "--save", checkpoints, "--save-interval", str(saved))
    resumed = train("resumed", "--load", checkpoints, "--ckpt-step", str(saved))

    printed = [tuple(map(int, numbers)) for numbers in line.findall(whole.output)]
    consumed = [sum(sizes[: step + 1]) for step in range(len(sizes))]
    assert printed == list(zip(range(1, 6), consumed, sizes, strict=True))
    assert [step["iteration"] for step in whole.steps] == [1, 2, 3, 4, 5]
    for step, size in zip(whole.steps, sizes, strict=True):
        # [data-parallel rank][stage][virtual stage][micro-batch]
        assert all(
            len(chunk) == size // 2
            for rank in step["measured"]["times_2RPVM"][0]
            for stage in rank
            for chunk in stage
        )
    for number, steps in enumerate(zip(*(read_steps(log_dir, r) for r in (0, 1)), strict=True)):
        assert [step["iteration"] for step in steps] == [number + 1] * 2
        held = [each for step in steps for each in step["micro_batches"]]
        assert len({sample for each in held for sample in each["samples"]}) == sizes[number]
    events = EventAccumulator(str(tmp_path / "whole-board")).Reload()
    assert [each.step for each in events.Scalars("sparse-balance/coverage-min")] == [1, 2, 3, 4, 5]

    assert [step["iteration"] for step in resumed.steps] == [3, 4, 5]
    assert resumed.grad_norms == whole.grad_norms[saved:]
    assert_same_steps(resumed.steps, whole.steps)


@pytest.mark.distributed
def test_a_resumed_run_equals_one_that_never_stopped_with_shards_and_without(
    documents: Path, tmp_path: Path
) -> None:
    """Weights, the optimizer's moments and its number of steps, and what the plugin has learnt."""
    common = (*EXPERT_FLAGS, "--ckpt-format", "torch_dist", "--sparse-balance-device", "cpu")
    sharded = ("--use-torch-fsdp2", "--no-gradient-accumulation-fusion")

    def run(name: str, ranks: int, *flags: str) -> TrainingRun:
        return train_small_model(
            *(ranks, documents, *common, *flags),
            log_dir=tmp_path / name,
            # Megatron refuses FSDP2 where kernels queue up behind one another.
            environment={"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
        ).require_success()

    save = ("--save", str(tmp_path / "checkpoint"), "--save-interval", "2")
    whole = run("whole", 2, *sharded, *save)
    assert read_run_log(tmp_path / "whole").header.job.lockstep_ranks == 2
    load = ("--load", str(tmp_path / "checkpoint"), "--ckpt-step", "2")
    resumed = run("resumed", 2, *sharded, *load)
    assert [step["iteration"] for step in resumed.steps] == [3, 4]
    assert_same_steps(resumed.steps, whole.steps)
    assert resumed.grad_norms == whole.grad_norms[2:]
    alone = run("alone", 1, *load)
    losses = [step["lm_loss"] for step in whole.steps[2:]]
    assert alone.logged("lm_loss") == pytest.approx(losses, rel=1e-5)


def scheduler(index: SampleIndex, *, data_parallel_size: int = 2, stages: int = 2) -> Scheduler:
    micro_batches = GLOBAL_BATCH // data_parallel_size // 2
    job = job_shape(data_parallel_size, micro_batches, stages, layers_per_chunk=LAYERS // stages)
    return make_scheduler(index, job=job)


def learnt(index: SampleIndex, consumed_samples: int, **shape: int) -> dict:
    """State of a run that has observed curves and times, after that many samples."""
    run = scheduler(index, **shape)
    curve_K = np.linspace(0.3, 1.0, len(run.planner.coverage.grid))
    run.planner.coverage.observe(
        np.broadcast_to(curve_K, run.planner.coverage.mean_LUK.shape),
        np.ones(run.planner.coverage.observed_LU.shape),
    )
    stages, calibration = run.job.pipeline_stages, run.planner._calibration
    times = np.ones((2, 1, stages, 1, 1))
    measured = step_measurement(times * np.array([3.0, 2.0]).reshape(2, 1, 1, 1, 1))
    for _ in range(3):
        calibration.update(Times(times, calibration.snapshot()), measured)
    run._finished_step = run.batch_sizes.step_at(consumed_samples) - 1
    return run.state_dict()


def test_state_does_not_depend_on_the_number_of_data_parallel_ranks(index: SampleIndex) -> None:
    state = learnt(index, 24, data_parallel_size=2)
    assert state == learnt(index, 24, data_parallel_size=1)
    other = scheduler(index, data_parallel_size=4)
    assert other.load_state_dict(state) == ()
    assert other.planner._calibration.snapshot().scales_2PV[0].tolist() == [[3.0], [3.0]]
    assert other.state_dict() == state


def test_another_pipeline_keeps_coverage_and_says_that_corrections_start_afresh(
    index: SampleIndex,
) -> None:
    state = learnt(index, 24, stages=2)
    resumed = scheduler(index, stages=1)
    (note,) = resumed.load_state_dict(state)
    assert note.startswith("calibration starts afresh: ")
    assert resumed.state_dict()["coverage"] == state["coverage"]
    assert resumed.state_dict()["calibration"] == Calibration(1).state_dict()


def test_other_settings_are_said_and_other_samples_refused() -> None:
    saved = {"flag base_budget": "4", "training samples": "a", "torch": "2.6"}
    assert compare_runs(saved, saved) == ()
    assert compare_runs(saved, saved | {"flag base_budget": "8", "flag new": "1"}) == (
        "flag base_budget is 8, in the checkpoint 4",
        "flag new is 1, in the checkpoint absent",
    )
    with pytest.raises(StateError, match="--finetune"):
        compare_runs(saved, saved | {"training samples": "b"})
