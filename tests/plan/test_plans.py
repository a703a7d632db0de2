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
    with_part,
)

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.cost.parts import SegmentCost
from sparsebalance_megatron.layer_budgets import DENSE, layer_budgets_text
from sparsebalance_megatron.plan.search.balance import arrival

BLOCK, SEGMENT_TOKENS = 64, 256
PIPELINES = [(8, 1, 1), (3, 1, 1), *2 * [(4, 1, 1), (2, 2, 2), (2, 2, 1), (4, 3, 1)]]
"""Ranks, stages and chunks."""
LONGEST = (2**14, 2**17, 2**20)
"""Tokens of the longest sample."""


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
    lengths = random_lengths(samples, seed, kind=kind, longest=draw(st.sampled_from(LONGEST)))
    in_order = arrival(lengths, job.groups, 1 << 40)
    fullest = max(sum(lengths[s] for s in held) for rank in in_order for held in rank)
    base_L = generator.choice([2, 8, 30, DENSE], job.layers).tolist()
    changes = {
        "tuning": draw(st.sampled_from(["off", "anchor", *3 * [DEFAULT_TUNING]])),
        "observed": draw(st.sampled_from([0.0, 0.5, 1.0, 1.0])),
        "dense_up_to": draw(st.sampled_from([0, 2048])),
        "positions": draw(st.sampled_from(["fixed", "planned"])),
        "layer_budgets": draw(st.sampled_from([None, layer_budgets_text(dict(enumerate(base_L)))])),
        "max_tokens_per_micro_batch": draw(st.sampled_from([fullest, 1 << 40])),
        "max_blocks": max(LONGEST) // BLOCK,
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
        cost = with_part(cost, row)
    if draw(st.booleans()):
        changes["slowness_RP"] = generator.uniform(0.7, 1.5, (ranks, stages))
    return step_inputs(job, lengths, seed, cost=cost, **changes), others


def check_budgets(given_, plan):
    """Budgets lose no more coverage than the policy allows, move only where curves are known, and
    are what the plan says of them."""
    plan_settings, curves, expected = given_["plan_settings"], given_["coverage"], plan.expectation
    config, layers, lengths = plan_settings.config, curves.layers, given_["lengths_tokens"]
    blocks_S = -(-np.array(lengths) // BLOCK)
    base_LS = np.minimum(plan_settings.base_LS(layers, lengths), blocks_S)
    budgets_LS = np.minimum(plan.budgets_LS, blocks_S)
    fixed_LS = (plan_settings.base_L(layers) == DENSE)[:, None] | ~curves.observed_LS(blocks_S)
    assert budgets_LS.min() >= 1
    assert (budgets_LS == base_LS)[fixed_LS | (config.tuning == "off")].all()
    assert expected.samples_cut == (budgets_LS < base_LS).any(axis=0).sum()
    assert expected.samples_raised == (budgets_LS > base_LS).any(axis=0).sum()
    if config.tuning != "anchor":
        assert expected.samples_cut == 0
    covered_LS = curves.coverage_LS(blocks_S, budgets_LS)
    lost_LS = np.nan_to_num(curves.coverage_LS(blocks_S, base_LS) - covered_LS)
    assert lost_LS.max() <= config.coverage_threshold + 1e-9
    if not curves.observed_LU.any() or np.isnan(covered_LS).all():
        assert (expected.coverage_mean, expected.coverage_min) == (None, None)
    else:
        assert expected.coverage_mean == pytest.approx(np.nanmean(covered_LS))
        assert expected.coverage_min == pytest.approx(np.nanmin(covered_LS))


@settings(max_examples=150)
@given(steps())
def test_plans_are_valid_above_their_bound_and_no_slower_than_with_less(step):
    given_, others = step
    plan, job = planned_no_slower(given_, *others), given_["job"]
    expected, lockstep_ranks = plan.expectation, job.lockstep_ranks
    positions = expected.times_2RPVM.shape[-1]
    if positions != job.micro_batches:
        assert positions < job.micro_batches and job.pipeline_stages == 1
        assert given_["plan_settings"].config.positions == "planned"
    job = replace(job, micro_batches=positions)
    plan.validate(given_["lengths_tokens"], job, given_["plan_settings"])
    assert expected.makespan_ms == max(expected.rank_makespan_ms)
    for ends in itertools.batched(expected.rank_makespan_ms, lockstep_ranks):
        assert len(set(ends)) == 1
    for micro_batch in plan.micro_batches:
        assert micro_batch.budgets_LS.dtype == np.int32
        assert not micro_batch.budgets_LS.flags.writeable
        assert job.context_parallel_size in (1, micro_batch.cp_size)
    check_budgets(given_, plan)
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
