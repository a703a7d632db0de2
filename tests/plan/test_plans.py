# SPDX-License-Identifier: Apache-2.0
"""What every plan holds, whatever ranks share, whom they wait for, and what is cut and tuned."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from plan.plan_cases import (
    DEFAULT_TUNING,
    check_segment_ms,
    cost_model,
    job_shape,
    planned_no_slower,
    random_lengths,
    step_inputs,
    with_experts_part,
)

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.parts import SegmentCost

BLOCK, SEGMENT_TOKENS = 64, 256
PIPELINES = [(4, 1, 1), (8, 1, 1), (3, 1, 1), (2, 2, 2), *2 * [(2, 2, 1), (4, 3, 1), (4, 2, 1)]]
"""Ranks, stages and chunks."""


@st.composite
def steps(draw):
    """Inputs of a plan, and settings under which its step is no shorter."""
    seed, size = draw(st.integers(0, 999)), draw(st.integers(1, 3))
    generator = np.random.default_rng(seed)
    ranks, stages, chunks = draw(st.sampled_from(PIPELINES))
    sharing = (
        draw(st.sampled_from(["alone", "equal", "planned", "planned"]))
        if ranks % 2 == 0
        else "alone"
    )
    job = replace(
        job_shape(ranks, stages * draw(st.sampled_from([1, 2])), stages, chunks),
        lockstep_ranks=draw(st.sampled_from([1, 2, ranks])) if ranks % 2 == 0 else ranks,
        context_parallel_size=2 if sharing == "equal" else 1,
    )
    samples = job.places // job.context_parallel_size * size
    kind = draw(st.sampled_from(["spread", "equal", "long", "tiny"]))
    lengths = random_lengths(samples, seed, kind=kind)
    changes = {
        "tuning": draw(st.sampled_from(["off", "anchor", *3 * [DEFAULT_TUNING]])),
        "observed": draw(st.sampled_from([0.0, 0.5, 1.0, 1.0])),
        "dense_up_to": draw(st.sampled_from([0, 2048])),
        "positions": draw(st.sampled_from(["fixed", "planned"])),
        "max_tokens_per_micro_batch": max(lengths) * size,
        "plan_ms": 2.0,
    }
    others = [{"batching": batching} for batching in ("arrival", "length", "latency")]
    if changes["tuning"] == DEFAULT_TUNING:
        others.append({"tuning": "off"})
    if sharing == "planned" and changes["tuning"] != "anchor":
        changes |= {"context_parallel": "dynamic", "max_cp_size": min(ranks, 4)}
        others.append({"context_parallel": "static"})
    if chunks == 1 and changes["tuning"] != "anchor" and draw(st.booleans()):
        changes |= {"max_segments": 4, "segment_tokens": SEGMENT_TOKENS}
        others.append({"max_segments": 1})
    cost = replace(
        cost_model(BLOCK),
        exchange=Exchange(bytes_per_token=512.0),
        segments=SegmentCost(operation_ms=(0.01, 0.02)),
    )
    if draw(st.booleans()):
        row = *generator.uniform(0.0, 0.1, 2), 10 ** generator.uniform(-5, -2), 0.0, 0.0
        cost = with_experts_part(cost, row)
    if draw(st.booleans()):
        changes["slowness_RP"] = generator.uniform(0.7, 1.5, (ranks, stages))
    return step_inputs(job, lengths, seed, cost=cost, **changes), others


@settings(max_examples=150)
@given(steps())
def test_plans_are_valid_above_their_bound_and_no_slower_than_with_less(step):
    given_, others = step
    plan, job = planned_no_slower(given_, *others), given_["job"]
    expected, lockstep_ranks = plan.expectation, job.lockstep_ranks
    positions = expected.times_2RPVM.shape[-1]
    assert positions == job.micro_batches or given_["plan_settings"].plans_positions(job)
    job = replace(job, micro_batches=positions)
    plan.validate(given_["lengths_tokens"], job, given_["plan_settings"])
    assert expected.makespan_ms == max(expected.rank_makespan_ms)
    for ends in itertools.batched(expected.rank_makespan_ms, lockstep_ranks):
        assert len(set(ends)) == 1
    for micro_batch in plan.micro_batches:
        assert micro_batch.budgets_LS.dtype == np.int32
        assert not micro_batch.budgets_LS.flags.writeable
        assert job.context_parallel_size in (1, micro_batch.cp_size)
    budgets_LS = plan.budgets_LS
    if given_["plan_settings"].config.tuning == "off":
        blocks_S = -(-np.array(given_["lengths_tokens"]) // BLOCK)
        base_LS = given_["plan_settings"].base_LS(job.layers, given_["lengths_tokens"])
        assert (np.minimum(budgets_LS, blocks_S) == np.minimum(base_LS, blocks_S)).all()
    observed = given_["coverage"].observed_LU
    if not observed.any():
        assert (expected.coverage_mean, expected.coverage_min) == (None, None)
        assert expected.samples_cut == expected.samples_raised == 0
    elif observed.all():
        assert 0 <= expected.coverage_min <= expected.coverage_mean <= 1
    if lockstep_ranks == 1:
        check_segment_ms(plan)
    rows = [plan.for_rank(rank).micro_batches for rank in range(job.data_parallel_size)]
    if expected.segment_ms:
        for group in itertools.batched(rows, lockstep_ranks):
            for row in zip(*group, strict=True):
                if row[0].segments > 1 and row[0].cp_size == 1:
                    tokens_WU = np.array([each.segment_tokens(BLOCK) for each in row])
                    assert tokens_WU.max(axis=0).min() >= SEGMENT_TOKENS
    elif lockstep_ranks == 1:
        cp_sizes = [[each.cp_size for each in row] for row in rows]
        chunks = job.virtual_stages
        name = (
            "no_pipeline" if job.pipeline_stages == 1 else "interleaved" if chunks > 1 else "1f1b"
        )
        naive = oracle.waiting_makespans(*expected.times_2RPVM.tolist(), cp_sizes, name)
        assert expected.rank_makespan_ms == pytest.approx(naive, rel=1e-9)
