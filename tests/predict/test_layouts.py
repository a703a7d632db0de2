# SPDX-License-Identifier: Apache-2.0
"""Advice: shares by hand, limits that must hold, choices that make no job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from sparsebalance_megatron.cost.memory import GIBIBYTE
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.layouts import AdviceInputs, Choice, advise
from sparsebalance_megatron.predict.lengths import WorkloadError, split_overlong
from sparsebalance_megatron.predict.models import MODELS, counted_cost
from sparsebalance_megatron.view.predictions import best_fitting, findings

MODEL = MODELS["qwen2.5-0.5b"]
LENGTHS = (4096, 900, 2048, 300, 8192, 512, 1024, 600)
CHOICE = Choice(block_size=128, base_budget=8, micro_batches=2, context_parallel_size=1)


def job(*, gpus: int = 4, pipeline_stages: int = 1, **changes: Any) -> AdviceInputs:
    values: dict[str, Any] = {
        "shape": MODEL.shape,
        "tied_embeddings": True,
        "batches": (LENGTHS,),
        "costs": lambda block_size: counted_cost(
            MODEL, block_size=block_size, selection="token-kv-head"
        ),
        "selection": "token-kv-head",
    } | changes
    ranks = gpus // pipeline_stages
    cut = Job.even(layers=MODEL.layers, ranks=ranks, stages=pipeline_stages)
    return AdviceInputs(job=cut, **values)


def test_tokens_that_stay_dense_are_those_of_documents_within_the_budget() -> None:
    (outlook,) = advise(job(), [CHOICE]).outlooks
    within = sum(length for length in LENGTHS if length <= 128 * 8)
    assert outlook.dense_tokens_share == pytest.approx(within / sum(LENGTHS))
    assert 0.0 < outlook.router_share < 0.5
    assert outlook.tokens_per_second_per_gpu == pytest.approx(
        sum(LENGTHS) / (outlook.step_ms / 1e3) / 4
    )


def test_a_budget_beyond_every_document_is_dense_attention_and_its_router() -> None:
    (outlook,) = advise(job(), [replace(CHOICE, base_budget=64)]).outlooks
    assert outlook.dense_tokens_share == 1.0
    # Placement is planned with the router's cost in one and without it in the other.
    assert outlook.speedup_over_dense == pytest.approx(1.0, abs=0.03)


def test_one_micro_batch_on_one_gpu_leaves_no_bubble() -> None:
    (outlook,) = advise(job(gpus=1), [replace(CHOICE, micro_batches=1)]).outlooks
    assert outlook.bubble_share == pytest.approx(0.0, abs=1e-9)
    (piped,) = advise(job(gpus=4, pipeline_stages=4), [replace(CHOICE, micro_batches=1)]).outlooks
    assert piped.bubble_share >= 0.75 - 1e-9
    assert len(piped.stages) == 4


def test_more_work_is_never_cheaper() -> None:
    budgets = [replace(CHOICE, base_budget=budget) for budget in (2, 8, 32)]
    outlooks = advise(job(), budgets).outlooks
    assert [each.step_ms for each in outlooks] == sorted(each.step_ms for each in outlooks)
    assert [each.stages[0].lists_bytes for each in outlooks] == sorted(
        each.stages[0].lists_bytes for each in outlooks
    )


def test_context_parallel_ranks_share_the_memory_of_the_longest_sample() -> None:
    apart, together = advise(
        job(batches=((32768, 100, 100, 100),)),
        [
            replace(CHOICE, micro_batches=1),
            replace(CHOICE, micro_batches=4, context_parallel_size=4),
        ],
    ).outlooks
    assert together.stages[0].activations_bytes < 0.5 * apart.stages[0].activations_bytes


def test_choices_that_make_no_job_are_left_out_by_name() -> None:
    found = advise(job(), [CHOICE, replace(CHOICE, micro_batches=3)])
    assert len(found.outlooks) == 1
    (reason,) = found.left_out
    assert "block size 128, budget 8, 3 micro-batches, context parallel 1: " in reason
    assert "multiple" in reason
    several = [replace(CHOICE, micro_batches=3, base_budget=budget) for budget in (8, 16)]
    (reason,) = advise(job(), [CHOICE, *several]).left_out
    assert reason.startswith("block size 128, 3 micro-batches, context parallel 1: ")
    with pytest.raises(WorkloadError, match="no choice makes a job"):
        advise(job(), [replace(CHOICE, micro_batches=3)])


def test_sentences_follow_from_the_numbers() -> None:
    found = advise(job(), [CHOICE, replace(CHOICE, base_budget=64)])
    best = best_fitting(found, 80.0)
    assert best.step_ms == min(each.step_ms for each in found.outlooks)
    assert findings(found, 80.0, best)[0].startswith("Fastest that fits 80 GiB: block size 128")
    tiny = min(each.fullest_bytes for each in found.outlooks) / GIBIBYTE / 2
    smallest = best_fitting(found, tiny)
    assert smallest.fullest_bytes == min(each.fullest_bytes for each in found.outlooks)
    assert findings(found, tiny, smallest)[0].startswith("No choice fits")
    said = findings(
        found, 80.0, replace(best, dense_tokens_share=0.9, router_share=0.2, bubble_share=0.3)
    )
    assert [sentence[:9] for sentence in said[1:]] == ["90% of th", "Selecting", "30% of th"]


def test_overlong_documents_are_split_as_training_splits_them() -> None:
    import numpy as np

    found = split_overlong(np.array([10, 4, 8, 5]), 4)
    assert found.tolist() == [4, 4, 2, 4, 4, 4, 4, 1]
