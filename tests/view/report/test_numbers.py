# SPDX-License-Identifier: Apache-2.0
"""Parts add up to steps, changes to the difference, and what differs between runs is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from plan.plan_cases import job_shape
from record_cases import header_of, step_record

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.log.reader import RunLog
from sparsebalance_megatron.log.records import StepRecord
from sparsebalance_megatron.view.report.numbers import compare, explain, split_time, summarize
from sparsebalance_megatron.view.report.words import settings_that_differ


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


def test_the_split_of_a_mean_step() -> None:
    split = split_time([step(1, 80, 15, 5), step(2, 60, 35, 5)])
    assert split is not None
    assert (split.compute_ms, split.waiting_ms, split.rest_ms) == (70.0, 25.0, 5.0)
    assert split.step_ms == 100.0


@pytest.mark.parametrize(
    "missing",
    [
        {"iteration_ms": None},
        {"figures": {"computing_ms_measured": None}},
        {"figures": {"makespan_ms_measured": None}},
    ],
)
def test_steps_without_a_part_are_left_out(missing: dict[str, Any]) -> None:
    unknown = step(2, 1, 1, 1, **missing)
    split = split_time([step(1, 80, 15, 5), unknown])
    assert split == split_time([step(1, 80, 15, 5)])
    assert split_time([unknown]) is None
    assert explain([(unknown, step(2, 1, 1, 1))]) is None


def test_less_attention_less_waiting_and_the_machine_are_told_apart() -> None:
    """A tenth less work on a machine that takes a fifth longer for it."""
    old = [step(i, 1000, 300, 50) for i in range(8)]
    less = {"figures": {"work_ratio": 0.9}}
    new = [step(i, 1000 * 0.9 * 1.2, 100, 60, **less) for i in range(8)]
    pairs = list(zip(old, new, strict=True))
    found = explain(pairs)
    assert found is not None
    assert dict(found.changes) == {
        "less attention": pytest.approx(-100.0),
        "less waiting": pytest.approx(-200.0),
        "optimizer, gradients": pytest.approx(10.0),
        "noise": pytest.approx(180.0),
    }
    assert found.speedup_interval == pytest.approx((1350.0 / 1240.0,) * 2)
    other = explain(pairs, same_base_budgets=False)
    assert other is not None
    assert other.changes[0] == ("other attention", pytest.approx(80.0))
    assert other.changes[1:] == found.changes[1:3]


_MS = st.floats(1.0, 1e4)


@given(
    st.lists(st.tuples(_MS, _MS, _MS, _MS, _MS, _MS, st.floats(0.5, 1.5)), min_size=1, max_size=9)
)
def test_changes_add_up(drawn: list[tuple[float, ...]]) -> None:
    pairs = [
        (step(i, *each[:3]), step(i, *each[3:6], figures={"work_ratio": each[6]}))
        for i, each in enumerate(drawn)
    ]
    found = explain(pairs)
    assert found is not None
    difference_ms = found.run.step_ms - found.baseline.step_ms
    assert sum(change.ms for change in found.changes) == pytest.approx(difference_ms, abs=1e-6)
    interval = found.speedup_interval
    assert (interval is None) == (len(drawn) < 6)
    if interval is not None:
        ratios = [old.iteration_ms / new.iteration_ms for old, new in pairs]
        assert min(ratios) - 1e-9 <= interval[0] <= interval[1] <= max(ratios) + 1e-9


def test_coverage_gained_is_weighed_by_tokens() -> None:
    def covered(tokens: int, gained: float | None) -> StepRecord:
        figures = {"coverage": 0.7, "coverage_base": 0.6, "coverage_gained_by_token": gained}
        return step_record(1, tokens=tokens, figures=figures)

    found = summarize([covered(100, 0.01), covered(300, 0.05), covered(5, None)]).figures
    assert (found["coverage"], found["coverage_base"]) == pytest.approx((0.7, 0.6))
    weighed = (0.01 * 100 + 0.05 * 300) / 400
    assert found["coverage_gained_by_token"] == pytest.approx(weighed)
    assert summarize([covered(5, None)]).figures["coverage_gained_by_token"] is None


def log(name: str, **changes: Any) -> RunLog:
    job = replace(job_shape(2, 2), **changes.pop("job", {}))
    header = structs.replace(header_of(job), **changes)
    return RunLog(directory=Path(name), header=header, steps=(), problems=())


def test_what_differs_is_named() -> None:
    config = {"block_size": 128, "tuning": "off", "log_dir": "a"}
    before, after = log("a", config=config), log("b", config=config | {"log_dir": "b"})
    assert compare(before, after).differences == ()
    assert settings_that_differ(compare(before, after)) == []
    other = log("b", config=config | {"block_size": 256}, job={"data_parallel_size": 7})
    (sentence,) = settings_that_differ(compare(before, other))
    assert "block size 128 in the baseline, 256 in the run" in sentence
    assert "data parallel size " in sentence and "7 in the run" in sentence


@pytest.mark.parametrize(("name", "value"), [("seq_length", 3), ("counts", {"samples": 5})])
def test_other_models_or_data_are_refused(name: str, value: Any) -> None:
    with pytest.raises(
        ConfigError, match=f"a and b trained other models or data: {name.replace('_', ' ')} "
    ):
        compare(log("a"), log("b", **{name: value}))


def test_without_headers_nothing_is_known() -> None:
    bare = RunLog(directory=Path("a"), header=None, steps=(), problems=())
    assert compare(bare, log("b", seq_length=3)).differences == ()
