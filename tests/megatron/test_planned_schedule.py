# SPDX-License-Identifier: Apache-2.0
"""The number of micro-batches that Megatron's schedule is given; steps in segments against it."""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from harness import PROGRAMS, run_training
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

from sparsebalance_megatron.megatron.planned_schedule import StepShape, as_planned


class Planned:
    """Steps of 3, 1 and 2 micro-batches, whose plans have no segments."""

    def __init__(self) -> None:
        self._left = [3, 1, 2]
        self._read = 0

    def next_step(self) -> StepShape:
        return StepShape(self._left[0])

    def __next__(self) -> int:
        self._read += 1
        if self._read == self._left[0]:
            self._left.pop(0)
            self._read = 0
        return self._read


def schedule(**keywords: Any) -> list[int]:
    """Reads as many micro-batches as it is told; experts report 1 for each in layer 1 of 2."""
    iterators: Any = keywords["data_iterator"]
    iterator: Iterator[int] = iterators[0] if isinstance(iterators, list) else iterators
    for _ in range(keywords["num_microbatches"]):
        next(iterator)
        get_moe_metrics_tracker().record("aux", torch.tensor(1.0), 1, 2)
    return [keywords["num_microbatches"]]


@pytest.fixture(autouse=True)
def _no_metrics() -> Iterator[None]:
    get_moe_metrics_tracker().metrics.clear()
    yield
    get_moe_metrics_tracker().metrics.clear()


def run(iterator: Any, **others: Any) -> int:
    keywords = {"data_iterator": iterator, "num_microbatches": 4, "model": [None], **others}
    (ran,) = as_planned(schedule, segments=False)(**keywords)
    return int(ran)


@pytest.mark.parametrize("as_list", [False, True])
def test_every_step_has_the_number_of_its_plan(as_list: bool) -> None:
    iterator = Planned()
    given = [iterator, iterator] if as_list else iterator
    assert [run(given) for _ in range(3)] == [3, 1, 2]


def test_evaluation_has_the_number_of_the_loop() -> None:
    assert run(iter(range(9)), forward_only=True) == 4


def test_a_step_that_megatron_runs_again_has_as_many_as_before() -> None:
    """The iterator below is then at the next step."""
    wrapped = RerunDataIterator(Planned())
    wrapped.saved_microbatches = [next(wrapped.iterable) for _ in range(3)]
    wrapped.rewind()
    assert run(wrapped) == 3
    wrapped.advance()
    assert run(wrapped) == 1
    wrapped.rewind()
    with pytest.raises(RuntimeError, match="--sparse-balance-max-segments 1"):
        as_planned(schedule, segments=True)(data_iterator=wrapped, num_microbatches=4)


def test_what_experts_report_is_the_mean_over_the_micro_batches_that_ran() -> None:
    """Megatron divides it by 4; it may stand beside what was reported before."""
    metrics = get_moe_metrics_tracker().metrics
    iterator = Planned()
    run(iterator)
    assert metrics["aux"].values.tolist() == pytest.approx([4.0, 0.0])
    run(iterator)
    assert metrics["aux"].values.tolist() == pytest.approx([8.0, 0.0])


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.parametrize("stages", [2, 4])
def test_a_thousand_steps_do_not_hang(stages, tmp_path):
    program = (str(PROGRAMS / "segmented_rank.py"), str(tmp_path), "1000")
    run_training(stages, (), program=program, timeout_s=600).require_success()
    for stage in range(stages):
        assert json.loads((tmp_path / f"rank{stage}.json").read_text()) == 1000


@pytest.mark.distributed
@pytest.mark.parametrize("stages", [2, 4])
def test_a_step_in_segments_learns_what_a_step_in_one_piece_learns(stages, tmp_path):
    program = (str(PROGRAMS / "segmented_rank.py"), str(tmp_path))
    run_training(stages, (), program=program).require_success()
    for stage in range(stages):
        for run in json.loads((tmp_path / f"rank{stage}.json").read_text()):
            cut, whole = run["cut"], run["whole"]
            np.testing.assert_allclose(cut["loss"], whole["loss"], rtol=1e-14)
            assert (cut["loss"] > 0) == (stage == stages - 1)
            for actual, expected in zip(cut["gradients"], whole["gradients"], strict=True):
                np.testing.assert_allclose(actual, expected, rtol=1e-12, atol=1e-14)
            # Gradients are reduced in the last backward of the step, or by grad_sync_func after it.
            late = run["sync"] and stage > 0
            ending = ["backward", "on", "sync"] if late else ["on", "backward"]
            tokens = run["tokens"] if stage == stages - 1 else 0
            assert cut["told"] == [
                "off",
                *["backward"] * (run["segments"] - 1),
                *ending,
                f"finalize {tokens}",
            ]
