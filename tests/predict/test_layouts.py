# SPDX-License-Identifier: Apache-2.0
"""Layouts: ranked by speed at no less coverage, within the memory, with reasons for the rest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from predict.predict_cases import scenario

from sparsebalance_megatron.predict.layouts import Advice, Choice, advise, named
from sparsebalance_megatron.predict.lengths import WorkloadError, split_overlong
from sparsebalance_megatron.predict.workload import Workload
from sparsebalance_megatron.view.predictions import findings

LENGTHS = (4096, 900, 2048, 300, 8192, 512, 1024, 600)
GPUS = 8
CHOICE = Choice(
    tensor_parallel_size=1,
    pipeline_stages=1,
    context_parallel_size=1,
    expert_parallel_size=1,
    micro_batches=1,
    block_size=256,
    base_budget=32,
)


def jobs(steps: int = 1) -> Callable[[Choice], Workload]:
    def workload_of(choice: Choice) -> Workload:
        ranks = GPUS // (choice.tensor_parallel_size * choice.pipeline_stages)
        settings = {"block_size": choice.block_size, "base_budget": choice.base_budget}
        return scenario(
            ranks=ranks,
            stages=choice.pipeline_stages,
            tensor_parallel_size=choice.tensor_parallel_size,
            context_parallel_size=choice.context_parallel_size,
            expert_parallel_size=choice.expert_parallel_size,
            micro_batches=len(LENGTHS) * choice.context_parallel_size // ranks,
            cap_tokens=8192 // choice.context_parallel_size,
            config=settings,
        ).workload((LENGTHS,) * steps)

    return workload_of


def advice(*choices: Choice, memory_gib: float = 80.0, steps: int = 1) -> Advice:
    return advise(choices, jobs(steps), memory_gib)


def layout(**changes: Any) -> Choice:
    return replace(CHOICE, **changes)


def test_the_fastest_at_no_less_coverage_comes_first() -> None:
    less = layout(base_budget=4)
    found = advice(less, CHOICE, layout(pipeline_stages=2))
    assert found.best.choice in (CHOICE, layout(pipeline_stages=2))
    assert found.predictions[-1].choice == less
    fastest = min(found.predictions, key=lambda each: each.sparse.makespan_ms)
    assert fastest.choice == less
    sentences = findings(found, 80.0)
    assert "at no less coverage" in sentences[0]
    assert "With less coverage" in sentences[1] and "budget 4" in sentences[1]
    # Without the default settings among them, the one that covers most is the reference.
    found = advice(less, layout(base_budget=8))
    assert found.best.choice.base_budget == 8


def test_what_does_not_fit_is_left_out_before_it_is_planned() -> None:
    roomy = layout(tensor_parallel_size=2, pipeline_stages=2)
    sizes = {choice: advice(choice).best.sparse.at_most_bytes / 2**30 for choice in (CHOICE, roomy)}
    assert sizes[roomy] < sizes[CHOICE]
    limit = (sizes[roomy] + sizes[CHOICE]) / 2
    found = advice(CHOICE, roomy, memory_gib=limit)
    assert [each.choice for each in found.predictions] == [roomy]
    (reason,) = found.left_out
    assert reason.startswith("TP 1, PP 1") and "at the token cap more than" in reason
    none = advice(CHOICE, roomy, memory_gib=0.1)
    assert not none.fits and none.best.choice == roomy
    assert findings(none, 0.1)[0].startswith("No choice fits 0.1 GiB")


def test_layouts_that_make_no_job_are_left_out_by_name() -> None:
    found = advice(CHOICE, layout(expert_parallel_size=2))
    (reason,) = found.left_out
    assert "EP 2" in reason and "has no experts" in reason
    with pytest.raises(WorkloadError, match="no choice makes a job"):
        advice(layout(expert_parallel_size=2))


def test_of_many_choices_the_slow_ones_are_told_from_the_first_steps() -> None:
    budgets = [layout(base_budget=budget) for budget in (4, 8, 16)]
    layouts = [
        layout(tensor_parallel_size=tp, pipeline_stages=pp) for tp in (1, 2) for pp in (1, 2)
    ]
    found = advice(*budgets, *layouts, steps=3)
    assert len(found.predictions) == 6
    assert any("slower in the first 2 steps" in reason for reason in found.left_out)
    assert {len(each.sparse.step_ms) for each in found.predictions} == {3}
    full = advice(*layouts, steps=3)
    assert found.best.choice == full.best.choice
    assert found.best.sparse.step_ms == full.best.sparse.step_ms


def test_choices_are_named_by_what_they_share() -> None:
    assert named([CHOICE]).startswith("TP 1, PP 1, CP 1, EP 1, 1 micro-batches")
    assert named([CHOICE, layout(pipeline_stages=2)]).startswith("2 choices, TP 1, CP 1")


def test_overlong_documents_are_split_as_training_splits_them() -> None:
    found = split_overlong(np.array([10, 4, 8, 5]), 4)
    assert found.tolist() == [4, 4, 2, 4, 4, 4, 4, 1]
