# SPDX-License-Identifier: Apache-2.0
"""Numbers by hand; parts add up to steps, changes to the difference; what sentences claim."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from plan.plan_cases import job_shape
from record_cases import header_of, step_record
from step_cases import JOB
from view.report.sample_run import SampleRun

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.learn.dealt_samples import StepWindow
from sparsebalance_megatron.log.reader import RunLog, read_rank_logs, read_run_log
from sparsebalance_megatron.log.records import RunHeader, StepRecord
from sparsebalance_megatron.plan.job import lockstep_notice
from sparsebalance_megatron.view.report.numbers import (
    Beside,
    Comparison,
    Explanation,
    Numbers,
    RunSummary,
    TimeSplit,
    compare,
    explain,
    numbers_of,
    split_time,
    summarize,
    whole_windows,
)
from sparsebalance_megatron.view.report.words import (
    caveats,
    changes,
    headline,
    numbers_table,
    settings_that_differ,
    slowest_device,
    slowest_text,
)


def step(
    iteration: int, compute_ms: float, waiting_ms: float, rest_ms: float, **changes: Any
) -> StepRecord:
    """A step in which every stage computes for equally long."""
    figures = {
        "computing_ms_measured": compute_ms,
        "computing_ms_predicted": compute_ms,
        "makespan_ms_measured": compute_ms + waiting_ms,
    }
    values: dict[str, Any] = {
        "iteration_ms": compute_ms + waiting_ms + rest_ms,
        "figures": figures | changes.pop("figures", {}),
    }
    return step_record(iteration, **(values | changes))


@pytest.mark.parametrize(
    "missing",
    [
        {"iteration_ms": None},
        {"figures": {"computing_ms_measured": None}},
        {"figures": {"makespan_ms_measured": None}},
    ],
)
def test_steps_without_a_part_are_left_out(missing: dict[str, Any]) -> None:
    unknown = step(3, 1, 1, 1, **missing)
    split = split_time([step(1, 80, 15, 5), step(2, 60, 35, 5), unknown])
    assert split is not None
    assert (split.compute_ms, split.waiting_ms, split.rest_ms) == (70.0, 25.0, 5.0)
    assert split.step_ms == 100.0
    assert split_time([unknown]) is None
    assert explain([(unknown, step(3, 1, 1, 1))]) is None


_MS = st.floats(1.0, 1e4)


@given(
    st.lists(st.tuples(_MS, _MS, _MS, _MS, _MS, _MS, st.floats(0.5, 1.5)), min_size=1, max_size=9)
)
def test_parts_add_up_and_an_interval_lies_within_the_ratios(
    drawn: list[tuple[float, ...]],
) -> None:
    pairs = [
        (step(i, *each[:3]), step(i, *each[3:6], figures={"work_ratio": each[6]}))
        for i, each in enumerate(drawn)
    ]
    found = explain(pairs)
    assert found is not None
    for side, split in enumerate((found.baseline, found.run)):
        mean_ms = np.mean([pair[side].iteration_ms for pair in pairs])
        assert split.step_ms == pytest.approx(mean_ms)
    interval = found.speedup_interval
    assert (interval is None) == (len(drawn) < 6)
    if interval is not None:
        ratios = [old.iteration_ms / new.iteration_ms for old, new in pairs]
        assert min(ratios) - 1e-9 <= interval[0] <= interval[1] <= max(ratios) + 1e-9


def log(name: str, *steps: StepRecord, header: RunHeader | None = None) -> RunLog:
    return RunLog(directory=Path(name), header=header, steps=steps, problems=())


def with_header(name: str, data_parallel_size: int = 2, **changes: Any) -> RunLog:
    job = replace(job_shape(2, 2), data_parallel_size=data_parallel_size)
    return log(name, header=structs.replace(header_of(job), **changes))


@pytest.mark.parametrize(("steps", "skipped"), [(1, 0), (4, 0), (5, 1), (24, 4), (25, 5), (90, 5)])
def test_warm_up(steps: int, skipped: int) -> None:
    times_ms = [1000.0] * skipped + [10.0] * (steps - skipped)
    run = summarize([step_record(i + 1, iteration_ms=ms) for i, ms in enumerate(times_ms)])
    assert (run.iteration_ms_median, run.warm_up_steps) == (10.0, skipped)


def test_numbers_of_a_run() -> None:
    """What was not measured is None and not 0."""
    run = summarize(
        [
            step_record(1, lm_loss=9.5, figures={"lower_bound_ms": 60.0, "work_ratio": None}),
            step_record(2, figures={"coverage": 0.5, "work_ratio": None}, iteration_ms=110.0),
            step_record(3, figures={"imbalance": 1.5, "work_ratio": None}),
            step_record(4, lm_loss=8.25, figures={"imbalance": 1.25, "work_ratio": None}),
        ]
    )
    assert run.iteration_ms_median == 100.0
    assert (run.loss_first, run.loss_last) == (9.5, 8.25)
    assert run.figures["imbalance"] == pytest.approx(1.125), "the median"
    assert run.figures["coverage"] == pytest.approx(0.6875), "the mean"
    assert run.figures["lower_bound_ms"] == 70.0
    assert run.figures["work_ratio"] is None
    unmeasured = summarize([step_record(1, iteration_ms=None, lm_loss=None)])
    assert (unmeasured.iteration_ms_median, unmeasured.loss_first) == (None, None)
    assert unmeasured.loss_last is None


def test_speed_is_that_of_one_gpu_and_its_share_of_the_peak() -> None:
    """Two steps of 64 tokens in 0.1 s each, of 197.8 TFLOP: of 2 x 989 TFLOP/s all."""
    header = structs.replace(header_of(JOB), device="NVIDIA H100 80GB HBM3", world_size=2)
    steps = [step_record(iteration, tflops=197.8, iteration_ms=100.0) for iteration in (2, 3)]
    run = summarize(steps, header)
    assert run.tokens_per_second_per_gpu == pytest.approx(320.0)
    assert run.utilisation == pytest.approx(1.0)
    unknown = summarize(steps, structs.replace(header, device="cpu", world_size=None))
    assert (unknown.tokens_per_second_per_gpu, unknown.utilisation) == (None, None)


@pytest.mark.parametrize(
    ("slow", "fast", "speedup", "problem"),
    [
        ({1: None, 2: 100, 3: 200, 4: 300}, {1: None, 2: 50, 3: 160, 4: 100}, 600 / 310, ""),
        # Pairs are of the same iteration.
        ({1: 100, 2: 100, 3: 900}, {1: 100, 3: 300}, 1000 / 400, "3 steps in slow, 2 in fast"),
        # 65 ms stands for a step of other samples, of which there is no speedup.
        ({1: 100, 2: 100}, {1: 100, 2: 65}, None, "differ in 1 of 2 steps, first in iteration 2"),
    ],
)
def test_speedup_of_all_steps(
    slow: dict[int, float], fast: dict[int, float], speedup: float | None, problem: str
) -> None:
    logs = []
    for name, times_ms in (("slow", slow), ("fast", fast)):
        steps = [
            step_record(i, iteration_ms=ms, tokens=64 + (ms == 65)) for i, ms in times_ms.items()
        ]
        logs.append(log(name, *steps))
    found = compare(*logs)
    assert found.speedup == (None if speedup is None else pytest.approx(speedup))
    assert problem in "".join(found.problems) and bool(problem) == bool(found.problems)


def test_what_differs_is_named() -> None:
    config = {"block_size": 128, "tuning": "off", "log_dir": "a"}
    before = with_header("a", config=config)
    after = with_header("b", config=config | {"log_dir": "b"})
    assert compare(before, after).differences == ()
    assert settings_that_differ(numbers_of(after, before)) == []
    assert compare(log("a"), after).differences == (), "nothing is known of a"
    other = with_header("b", 7, config=config | {"block_size": 256})
    (sentence,) = settings_that_differ(numbers_of(other, before))
    assert "block size 128 -> 256" in sentence and "data parallel size 2 -> 7" in sentence


@pytest.mark.parametrize(("name", "value"), [("seq_length", 3), ("counts", {"samples": 5})])
def test_other_models_or_data_are_refused(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"a and b trained other models or data: {name.replace('_', ' ')} "
    ):
        compare(with_header("a"), with_header("b", **{name: value}))


def summary(**changes: Any) -> RunSummary:
    values: dict[str, Any] = dict.fromkeys(RunSummary.__dataclass_fields__)
    values |= {"steps": 9, "warm_up_steps": 1}
    return RunSummary(**(values | changes))


def numbers_in(*sentences: str) -> list[float]:
    """All numbers, in order."""
    found = re.findall(r"[+-]?\d[\d,.]*\d|\d", " ".join(sentences))
    return [float(number.replace(",", "")) for number in found]


def compared(**changes: Any) -> Comparison:
    values: dict[str, Any] = {"speedup": None}
    values |= {"baseline": summary(), "sparse_balance": summary(), "problems": ()}
    return Comparison(**(values | changes))


def numbers(comparison: Comparison, **beside: Beside) -> Numbers:
    return Numbers(run=comparison.sparse_balance, comparison=comparison, beside=beside)


EXPLAINED = Explanation(
    baseline=TimeSplit(compute_ms=5000.0, waiting_ms=900.0, rest_ms=100.0),
    run=TimeSplit(compute_ms=4700.0, waiting_ms=200.0, rest_ms=100.0),
    speedup_interval=(1.15, 1.25),
)


def test_a_speedup_has_an_interval_and_its_parts() -> None:
    comparison = numbers(compared(speedup=1.2, explanation=EXPLAINED))
    assert numbers_in(headline(comparison)) == [1.2, 95, 1.15, 1.25, 5000, 6000]
    assert numbers_in(*changes(comparison)) == [6000, -300, -700, 0]


def test_a_gain_is_split_by_the_runs_beside() -> None:
    """Over the baseline: mode exact 1.2, fixed budgets 1.5, the run 1.8 times as fast."""

    def beside(kind: str, speedup: float) -> Beside:
        return Beside(kind, compared(speedup=speedup), compared(speedup=1.8 / speedup))

    exact, fixed = beside("placement", 1.2), beside("attention", 1.5)
    comparison = compared(speedup=1.8)
    *_, gain = changes(numbers(comparison, exact=exact))
    assert numbers_in(gain) == [1.2, 1.5]
    *_, gain = changes(numbers(comparison, exact=exact, fixed=fixed))
    assert numbers_in(gain) == [1.2, 1.25, 1.2]
    assert "gain" not in "".join(changes(numbers(comparison, fixed=fixed)))


def test_no_more_is_claimed_than_is_known() -> None:
    assert numbers_in(headline(numbers(compared()))) == []
    assert changes(numbers(compared())) == []


def test_what_times_include_is_said_of_the_run_that_they_are_of() -> None:
    alone, lockstep = summary(lockstep_ranks=1), summary(lockstep_ranks=4)
    notice = lockstep_notice(4)
    assert caveats(Numbers(run=alone)) == []
    assert caveats(Numbers(run=lockstep)) == [notice]
    both = compared(baseline=lockstep, sparse_balance=lockstep)
    assert caveats(numbers(both)) == [notice]
    both = compared(baseline=alone, sparse_balance=lockstep)
    assert caveats(numbers(both)) == [f"Run: {notice}"]


def test_the_slowest_device_is_named_with_its_host(tmp_path: Path) -> None:
    """Stage 0 of rank 1 takes half as long again; another layout before it does not count."""
    steps = read_run_log(SampleRun(steps=4, noise=0.0).write(tmp_path)).steps
    assert slowest_device(steps) is None, "all are alike"
    for step in steps:
        step.measured.times_2RPVM[:, 1, 0] *= 1.5
    found = slowest_device((step_record(1), *steps))
    assert found == ((1, 0), pytest.approx(1.5, rel=0.01))
    ranks = read_rank_logs(tmp_path)
    assert slowest_text(*found, ranks).startswith("slowest: rank 1 stage 0 on node0, 1.50 times")
    assert slowest_device((*steps, step_record(1))) is None


def in_windows(record: StepRecord, steps: int, first: int) -> StepRecord:
    """The step in windows of so many, of which one begins with iteration ``first``."""
    number = (record.iteration - first) % steps
    window = StepWindow(number=number, steps=steps, steps_moved=1.0, sample_tokens=64)
    return structs.replace(record, window=window)


def test_runs_are_compared_by_whole_windows() -> None:
    """Windows of four and of two from the third step on, against order of arrival."""
    tokens = {4: [64, 64, 90, 40, 50, 76, 70, 58, 64, 64, 1], 2: [64, 64, 80, 48, 60, 68, 64, 64]}
    arrived = [step(i, 80, 15, 5) for i in range(1, 12)]
    logs = {1: log("1", *arrived)}
    for steps, counts in tokens.items():
        found = [step(i, 60, 10, 5, tokens=each) for i, each in enumerate(counts, start=1)]
        dealt = [in_windows(each, steps, first=3) for each in found[2:]]
        logs[steps] = log(str(steps), *found[:2], *dealt)
        compared = compare(logs[1], logs[steps])
        assert compared.speedup == pytest.approx(100 / 75)
        assert not any("token counts" in problem for problem in compared.problems)
    both = list(zip(logs[2].steps, logs[4].steps, strict=False))
    assert list(map(len, whole_windows(both))) == [1, 1, 4]
    assert not any("token counts" in each for each in compare(logs[2], logs[4]).problems)
    rows = {row[""].strip(): row for row in numbers_table(numbers_of(logs[4], logs[1]), every=True)}
    assert rows["of a window"]["run"] == "4"
    assert rows["tokens a step: deviation over mean"]["baseline"] == "0.0%"
    assert rows["correlation with the step before"]["baseline"] == "not measured"
    assert "of a window" not in {
        row[""].strip() for row in numbers_table(Numbers(run=summarize(arrived)), every=True)
    }


def test_losses_and_tokens_of_windows() -> None:
    found = [step(i, 1, 1, 1, tokens=i % 2 * 10 + 10, lm_loss=float(i)) for i in range(1, 11)]
    summary = summarize([in_windows(each, 4, first=1) for each in found])
    assert (summary.loss_first, summary.loss_last) == (2.5, 6.5), "of whole windows"
    assert summary.window_steps == 4
    assert summary.tokens_variation == pytest.approx(1 / 3)
    assert summary.tokens_correlation == pytest.approx(-1.0)
    gap = [in_windows(each, 4, first=1) for each in found if each.iteration != 3]
    assert [len(window) for window in whole_windows([(each,) for each in gap])] == [4]
