# SPDX-License-Identifier: Apache-2.0
"""Two ranks that exchange tokens in every layer of experts, in Megatron's own loop, one of them
slow."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from harness import (
    CHANGED,
    EXPERT_FLAGS,
    EXPERT_PARALLEL_FLAGS,
    TrainingRun,
    assert_same_steps,
    long_tailed_lengths,
    measured_ms,
    read_steps,
    train,
    write_documents,
)

from sparsebalance_megatron import cli
from sparsebalance_megatron.log.reader import read_run_log
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.view.report.numbers import summarize

_BALANCING_LOSS = re.compile(r"load_balancing_loss: ([-+.\deE]+)")
_VALIDATION_LOSS = re.compile(r"validation loss at iteration .*? value: ([-+.\deE]+)")
LEARNING = (
    "--sparse-balance-config calibration=measured --sparse-balance-device cpu --train-iters 11"
)


def tokens_of_rank(log_dir: Path, rank: int) -> int:
    """Tokens of the last three steps."""
    steps = read_steps(log_dir, rank)[-3:]
    return sum(sum(each["lengths_tokens"]) for step in steps for each in step["micro_batches"])


@pytest.mark.distributed
def test_a_slow_rank_of_an_expert_group_is_found_and_every_reader_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks run long micro-batches first. One sleeps in every layer, the other waits for it."""
    prefix = write_documents(tmp_path / "train", long_tailed_lengths(70, longest=250))
    log_dir = tmp_path / "log"
    run = train(
        *(2, prefix, *EXPERT_PARALLEL_FLAGS, *LEARNING.split(), "--num-layers", "2"),
        *("--sparse-balance-config", "positions=fixed"),
        log_dir=log_dir,
        program=(CHANGED, "slow-rank"),
    ).require_success()
    notice = lockstep_notice(2)
    assert notice is not None
    assert run.output.count(notice) == 1

    header = json.loads((log_dir / "steps.jsonl").read_text().splitlines()[0])
    assert header["job"]["lockstep_ranks"] == 2
    for step in run.steps:
        predicted = step["predicted"]
        ms_2RM = np.sum(predicted["times_2RPVM"], axis=(2, 3))
        if np.ptp(step["device_slowness_RP"]) == 0.0:
            assert (np.diff(ms_2RM.sum(axis=0)) <= 0).all()
            # Another rank may be the slowest in another layer, and a group divides its experts.
            slowest_ms = ms_2RM.max(axis=1).sum()
            assert predicted["makespan_ms"] == pytest.approx(slowest_ms, rel=0.1)
    assert len(run.steps) == 11
    slowed_2 = np.array(run.steps[-1]["device_slowness_RP"])[:, 0]
    assert slowed_2[0] < 1.0 < slowed_2[1]
    assert tokens_of_rank(log_dir, 1) < tokens_of_rank(log_dir, 0)

    # The medians of what ranks computed and waited: both take equally long.
    passed_2RM = np.array([measured_ms(step) for step in run.steps])
    own_2RM = passed_2RM - [step["measured"]["waiting_2RPVM"] for step in run.steps]
    waited_R = np.median((passed_2RM - own_2RM).sum(axis=(1, 3, 4, 5)), axis=0)
    own_R = np.median(own_2RM.sum(axis=(1, 3, 4, 5)), axis=0)
    assert (own_2RM <= passed_2RM).all()
    assert waited_R[0] > 2.0 * waited_R[1]
    assert own_R[1] > 1.2 * own_R[0]
    log = read_run_log(log_dir)
    numbers = summarize(log.steps, log.header)
    assert (numbers.figures["imbalance"] or 0.0) > 1.1
    assert numbers.split is not None
    assert numbers.split.waiting_ms > 0.1 * numbers.split.compute_ms

    words = " ".join(notice.split())
    for command in (
        ("summary", "--baseline", str(log_dir), "--run", str(log_dir)),
        ("watch", str(log_dir), "--once"),
        ("report", str(log_dir), "-o", str(tmp_path / "page.html")),
    ):
        assert cli.main(command) == 0
        assert words in " ".join(capsys.readouterr().out.split()), command
    assert notice in (tmp_path / "page.html").read_text("utf-8")


@pytest.mark.nightly
def test_experts_resume_on_more_ranks_and_not_on_one(documents: Path, tmp_path: Path) -> None:
    """With budgets fixed, losses do not depend on who holds which experts."""
    flags = (*EXPERT_PARALLEL_FLAGS, "--ckpt-format", "torch_dist")
    flags += ("--sparse-balance-tuning", "off", "--sparse-balance-device", "cpu")

    def run(name: str, ranks: int, *more: str) -> TrainingRun:
        return train(ranks, documents, *flags, *more, log_dir=tmp_path / name)

    save = ("--save", str(tmp_path / "saved"), "--save-interval", "2")
    whole = run("whole", 2, *save).require_success()
    load = ("--load", save[1], "--ckpt-step", "2", "--expert-model-parallel-size")
    more = run("more", 4, *load, "4").require_success()
    assert more.logged("iteration") == [3, 4]
    assert more.logged("lm_loss") == pytest.approx(whole.logged("lm_loss")[2:], rel=1e-5)
    one = run("one", 1, *load, "1")
    assert one.exit_code == 2
    assert f"--load {save[1]}: saved with --expert-model-parallel-size 2" in one.output
    weights = run("weights", 1, *load, "1", "--no-load-optim").require_success()
    assert weights.logged("lm_loss")[0] == pytest.approx(whole.logged("lm_loss")[2], rel=1e-5)


@pytest.mark.distributed
def test_routers_count_no_padding(documents: Path, tmp_path: Path) -> None:
    """Packed sequences are padded to a multiple of the two ranks, which compute half of each."""
    flags = """
        --moe-router-enable-expert-bias --moe-router-score-function sigmoid --train-iters 2
        --tensor-model-parallel-size 2 --sequence-parallel --sparse-balance-device cpu"""
    run = train(
        *(2, documents, *EXPERT_FLAGS, *flags.split()),
        log_dir=tmp_path / "log",
        program=(CHANGED, "counted-experts"),
    ).require_success()
    assert any(run.logged("padded_tokens"))
    counts = [int(count) for count in re.findall(r"experts chosen: (\d+)", run.output)]
    layers, top_k = 4, 2
    assert sum(counts) == layers * top_k * sum(run.logged("tokens"))
    assert len(counts) == 4


@pytest.mark.distributed
def test_runs_whose_numbers_of_positions_change_go_on_and_are_evaluated(
    tmp_path: Path,
) -> None:
    """Saved, resumed and evaluated. Losses are those of one rank in test_matrix."""
    prefix = write_documents(tmp_path / "documents", long_tailed_lengths(90, longest=250))
    # The balancing loss is logged, and too small to matter.
    flags = """
        --ckpt-format torch_dist --split 80,10,10 --train-iters 6 --eval-interval 2 --eval-iters 1
        --moe-aux-loss-coeff 1e-12 --sparse-balance-tuning off"""
    save = ("--save", str(tmp_path / "saved"), "--save-interval", "3")

    def run(name: str, *more: str) -> TrainingRun:
        words = (*EXPERT_PARALLEL_FLAGS, *flags.split(), *more)
        return train(2, prefix, *words, log_dir=tmp_path / name).require_success()

    planned = run("planned", *save)
    resumed = run("resumed", "--load", save[1], "--ckpt-step", "3")

    counts = [measured_ms(step).shape[-1] for step in planned.steps]
    assert max(counts) <= 4 and len(set(counts)) > 1, counts
    assert all((measured_ms(step) > 0.0).all() for step in planned.steps)
    assert [step["iteration"] for step in resumed.steps] == [4, 5, 6]
    assert_same_steps(resumed.steps, planned.steps)

    assert len(set(planned.logged("lm_loss"))) == 6
    assert resumed.grad_norms == planned.grad_norms[3:]
    # The loop's own number of micro-batches evaluates the same weights alike.
    validated, again = (_VALIDATION_LOSS.findall(run.output) for run in (planned, resumed))
    assert len(validated) >= 4 and again == validated[-len(again) :]
    # The mean over micro-batches of what is about 1 in each: once a layer and step.
    logged = [float(loss) for loss in _BALANCING_LOSS.findall(planned.output)]
    assert len(logged) == 6 and all(0.9 < loss < 1.6 for loss in logged), logged
