# SPDX-License-Identifier: Apache-2.0
"""Whole plans: invariants, purity, honest expectations.

They are never worse than simpler batching, and near the optimum of small cases.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import plan as oracle
from oracles.placement import best_makespan_ms
from plan.plan_cases import (
    DEFAULT_TUNING,
    changed,
    cost_model,
    job_shape,
    placed,
    planned,
    random_lengths,
    step_inputs,
)

from sparsebalance_megatron.cost.model import StageScales
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.coverage import CoverageCurves
from sparsebalance_megatron.plan.step_costs import step_costs

SHAPES = st.sampled_from([(2, 4, 2, 1), (3, 2, 1, 1), (1, 4, 2, 2), (2, 3, 4, 1), (1, 1, 1, 1)])
SEEDS = st.integers(0, 2**32 - 1)


def arguments(
    shape=(2, 4, 2, 1), seed=0, kind="spread", size=2, observed=1.0, uneven=False, **changes
):
    """``uneven``: devices differ in speed."""
    job = job_shape(*shape)
    lengths = random_lengths(job.places * size, seed, kind=kind)
    slowness_RP = None
    if uneven:
        devices = (job.data_parallel_size, job.pipeline_stages)
        slowness_RP = np.random.default_rng(seed).uniform(0.7, 1.6, devices)
    choices = {"slowness_RP": slowness_RP, "observed": observed} | changes
    return {"step": 7} | step_inputs(job, lengths, seed, **choices)


@pytest.mark.parametrize("group_size", [None, 4])
def test_chunks_take_turns_after_as_many_micro_batches_as_the_job_says(group_size):
    given_ = arguments((2, 8, 2, 2), size=1)
    given_["job"] = replace(given_["job"], micro_batch_group_size=group_size)
    expected = planned(**given_).expectation
    naive = [
        oracle.makespan(*times_2PVM.tolist(), "interleaved", group_size)
        for times_2PVM in expected.times_2RPVM.swapaxes(0, 1)
    ]
    assert expected.rank_makespan_ms == pytest.approx(naive, rel=1e-9)


@settings(max_examples=20)
@given(SHAPES, SEEDS, st.sampled_from(["off", DEFAULT_TUNING]))
def test_times_contain_how_slow_a_device_is_and_work_does_not(shape, seed, tuning):
    given_ = arguments(shape, seed, uneven=True, tuning=tuning)
    plan = planned(**given_)
    nominal = dict(given_, scales=StageScales.of(given_["scales"].scales_2PV))
    lengths = given_["lengths_tokens"]
    dense_LS = given_["plan_settings"].dense_LS(given_["job"].layers, lengths)
    costs = step_costs(lengths, given_["job"], given_["cost"], nominal["scales"], dense_LS)
    budgets_LS = plan.budgets_LS
    micro_batch_of_S = np.empty(len(lengths), dtype=np.int64)
    for place, micro_batch in enumerate(plan.micro_batches):
        micro_batch_of_S[list(micro_batch.samples)] = place
    where = placed(micro_batch_of_S, given_["job"])
    work = costs.micro_batch_ms(costs.sample_ms(budgets_LS), where).by_micro_batch_2RPVM
    slowness = given_["scales"].slowness_RP[..., None, None]
    np.testing.assert_allclose(plan.expectation.times_2RPVM, work * slowness, rtol=1e-12)
    base_LS = np.full_like(budgets_LS, given_["plan_settings"].config.base_budget)
    base_work = costs.micro_batch_ms(costs.sample_ms(base_LS), where).ms_OR
    ratio = work.sum() / base_work.sum()
    assert plan.expectation.work_ratio == pytest.approx(ratio)


def test_samples_that_do_not_fit_by_length_run_in_order_of_arrival():
    lengths = [6, 7, 5, 6, 8, 4, 8, 1, 9]
    cap = {"batching": "length", "max_tokens_per_micro_batch": 18}
    assert planned(**step_inputs(job_shape(1, 3), lengths, **cap)).batching == "arrival"


def test_contradicting_inputs():
    given_ = arguments()
    with pytest.raises(PlanError, match="block size 128 differs from the cost model's 64"):
        planned(**changed(given_, block_size=128))
    with pytest.raises(PlanError, match="9 layers, the job 4"):
        planned(**(given_ | {"coverage": CoverageCurves(9, 2048, 0.9)}))
    with pytest.raises(PlanError, match="does not fit the coverage grid"):
        planned(**(given_ | {"coverage": CoverageCurves(4, 16, 0.9)}))


def test_search_follows_the_step_that_it_is_for():
    """Longer steps are searched for longer; a number of ms is kept to."""
    lengths = np.random.default_rng(4).integers(1000, 20000, 32).tolist()
    given_ = arguments((4, 8, 4, 1), size=1) | {"lengths_tokens": lengths}
    spent = {}
    for name, factor, plan_ms in (
        ("short", 1e-3, None),
        ("long", 10.0, None),
        ("fixed", 10.0, 0.0),
    ):
        scales = StageScales.of(factor * np.ones((2, 4, 1)))
        plan = planned(**changed(given_, plan_ms=plan_ms) | {"scales": scales})
        spent[name] = plan.expectation.makespan_ms / factor
    assert spent["long"] < 0.995 * spent["short"]
    assert spent["fixed"] == pytest.approx(spent["short"])


def test_dense_samples_come_first() -> None:
    """In how many layers the samples of a micro-batch are dense never rises."""
    given_ = arguments(size=4)
    settings_ = given_["plan_settings"]
    mixed = 0
    for micro_batch in planned(**given_).micro_batches:
        layers_S = settings_.dense_LS(given_["job"].layers, micro_batch.lengths_tokens).sum(axis=0)
        assert (np.diff(layers_S) <= 0).all()
        mixed += layers_S[0] > layers_S[-1]
    assert mixed


@pytest.mark.parametrize(
    ("shape", "samples"),
    [((2, 2, 2), 5), ((2, 3, 2), 6), ((3, 2, 2), 7), ((2, 3, 1), 8), ((2, 3, 2), 9)],
)
@pytest.mark.parametrize("seed", range(3))
def test_within_three_percent_of_the_optimum(shape, samples, seed):
    pytest.importorskip("ortools", reason="the oracle needs ortools: pip install ortools")
    job = job_shape(*shape)
    generator = np.random.default_rng(seed)
    lengths = np.exp(generator.uniform(np.log(500), np.log(30000), samples)).astype(int).tolist()
    costs = step_costs(lengths, job, cost_model(), StageScales.ones(job.pipeline_stages))
    sample_2SX = costs.sample_ms(np.full((job.layers, samples), 8))
    best = best_makespan_ms(*sample_2SX.tolist(), costs.constant_2C.tolist(), shape[0], shape[1])
    assert best is not None, "CP-SAT proved no optimum in time"
    found = planned(**step_inputs(job, lengths, tuning="off")).expectation.makespan_ms
    assert best * (1 - 1e-3) <= found <= best * 1.03


@pytest.mark.parametrize("seed", range(4))
def test_within_five_percent_of_the_bound_below_the_unhideable_limit(seed):
    job = job_shape(4, 16, 4)
    lengths = np.random.default_rng(seed).integers(2000, 12000, 64).tolist()
    assert max(lengths) / np.mean(lengths) < (16 + 4 - 1) / 4
    expected = planned(**step_inputs(job, lengths)).expectation
    assert expected.makespan_ms <= 1.05 * expected.lower_bound_ms
