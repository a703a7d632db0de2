# SPDX-License-Identifier: Apache-2.0
"""Plans of layers that differ in their base budgets, and of documents that are dense.

What those cost, and that none is slower for it.
"""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from plan.plan_cases import (
    DEFAULT_TUNING,
    changed,
    changed_settings,
    cost_model,
    job_shape,
    plan_settings,
    planned,
    planned_no_slower,
    problem_of,
    random_lengths,
    step_inputs,
)
from predict.predict_cases import SHAPE

from sparsebalance_megatron.cost.dense_length import crossing_tokens
from sparsebalance_megatron.cost.model import CostModel, Efficiency
from sparsebalance_megatron.errors import ConfigError
from sparsebalance_megatron.layer_budgets import DENSE


@pytest.mark.parametrize("tuning", ["anchor", DEFAULT_TUNING])
def test_the_base_budget_for_every_layer_is_no_change(tuning):
    given_ = inputs(4, cost_model(), tuning=tuning)
    named = changed_settings(given_["plan_settings"], base_budget=1, layer_budgets="8:0-3")
    assert planned(**given_).digest() == planned(**given_ | {"plan_settings": named}).digest()


def test_layers_that_the_job_does_not_have():
    with pytest.raises(ConfigError, match="names layer 4"):
        planned(**inputs(0, cost_model(), layer_budgets="dense:4"))


BLOCK = 64
SHAPES = [(2, 4, 2, 1), (1, 4, 2, 2), (4, 3, 1, 1), (8, 2, 1, 1)]
"""Ranks, positions, stages and chunks."""


def inputs(seed, cost, *, lockstep_ranks=1, longest=2**15, **changes):
    job = job_shape(*SHAPES[seed % len(SHAPES)])
    if job.data_parallel_size % lockstep_ranks == 0:
        job = replace(job, lockstep_ranks=lockstep_ranks)
    lengths = random_lengths(3 * job.places, seed, longest=longest)
    return step_inputs(job, lengths, seed, cost=cost, max_blocks=1024, **changes)


def counted(sparse, block_size=BLOCK):
    return CostModel.analytic(SHAPE, block_size, efficiency=Efficiency(sparse=sparse))


@pytest.mark.parametrize("lockstep_ranks", [1, 2])
@pytest.mark.parametrize("segments", [1, 4])
def test_dense_documents_cost_what_they_do_in_dense_layers(lockstep_ranks, segments):
    """They are dense by their length, or since the base budget covers them."""
    most = {"max_segments": segments, "segment_tokens": 64, "tuning": "off"}
    for seed in range(4):
        for how in ({"dense_up_to": 2**12}, {"base_budget": 64}):
            ours = inputs(
                seed, cost_model(), lockstep_ranks=lockstep_ranks, longest=2**12, **most, **how
            )
            dense = plan_settings(layer_budgets="dense:all", **most)
            found, expected = planned(**ours), planned(**ours | {"plan_settings": dense})
            placed, others = (
                [(each.samples, each.rank, each.position) for each in plan.micro_batches]
                for plan in (found, expected)
            )
            assert placed == others
            assert found.expectation.makespan_ms == expected.expectation.makespan_ms


@pytest.mark.parametrize("sparse", [0.05, 0.13, 0.24, 0.36, 0.6])
def test_fixed_budgets_are_never_slower_than_dense_attention(sparse):
    """Placement is ours in 200 random jobs, some of whose ranks wait in every layer, some of whose
    layers have budgets of their own."""
    cost = counted(sparse)
    for seed in range(40):
        base = (8, 16)[seed % 2]
        choices = {"tuning": "off", "base_budget": base, "plan_ms": 40.0}
        choices["layer_budgets"] = (None, "4:0 40:1")[seed // 2 % 2]
        tokens = crossing_tokens(cost, base, 2**15)
        given = inputs(seed, cost, lockstep_ranks=(1, 2)[seed // 4 % 2], **choices)
        ours = plan_settings(**choices, dense_up_to=tokens)
        dense = plan_settings(**choices | {"layer_budgets": "dense:all"})
        found, exact = (
            planned(**given | {"plan_settings": each}).expectation.makespan_ms
            for each in (ours, dense)
        )
        assert found <= 1.005 * exact, (seed, found / exact)


@pytest.mark.parametrize("lockstep_ranks", [1, 2])
def test_no_raised_layer_takes_longer_than_dense_attention(lockstep_ranks):
    """One that would reads everything, densely, behind documents of which the layer does, too; by
    lists it takes less."""
    cost, jumped = counted(0.13), 0
    for seed in range(12):
        base = (8, 24)[seed % 2]
        tokens = crossing_tokens(cost, base, 2**15)
        choices = {"base_budget": base, "dense_up_to": tokens, "tuning": "raise"}
        given = inputs(seed, cost, lockstep_ranks=lockstep_ranks, **choices)
        problem = problem_of(given)
        costs, plan = problem.costs, planned_no_slower(given, {"tuning": "off"})
        pair_2L1 = costs.pair_2C[:, costs.chunk_of_layer_L, None]
        blocks_LS = np.broadcast_to(np.maximum(costs.blocks_S, base), plan.budgets_LS.shape)
        assert (plan.budgets_LS == blocks_LS)[costs.dense_LS].all()
        assert (plan.budgets_LS >= base)[~costs.dense_LS].all()
        lists_LS = (costs.block_pairs(plan.budgets_LS) * pair_2L1).sum(axis=0)
        becomes_LS = (plan.budgets_LS >= costs.blocks_S) & ~costs.dense_LS
        is_raised_LS = (plan.budgets_LS > base) & ~costs.dense_LS & ~becomes_LS
        assert (lists_LS < costs.denser_2SL.sum(axis=0).T)[is_raised_LS].all()
        jumped += becomes_LS.sum()
        for micro_batch in plan.micro_batches:
            samples = list(micro_batch.samples)
            is_dense_LS = (becomes_LS | costs.dense_LS)[:, samples]
            after_LS = np.logical_and.accumulate(is_dense_LS, axis=1)
            assert (after_LS == is_dense_LS)[becomes_LS[:, samples].any(axis=1)].all()
            assert (after_LS.sum(axis=1) == micro_batch.dense_documents_L).all()
    assert jumped


@pytest.mark.parametrize("seed", [1, 38, 50])
def test_raised_budgets_leave_room_for_lists_behind_other_documents(seed):
    """In segments samples keep their order, so that not all short documents are dense."""
    lengths = random_lengths(32, seed, longest=2**15)
    choices = {"dense_up_to": 2048, "max_segments": 4, "segment_tokens": 256, "plan_ms": 2.0}
    planned_no_slower(step_inputs(job_shape(2, 4, 2), lengths, seed, **choices), {"tuning": "off"})


def raised(seed, **changes):
    """Inputs under tuning raise that lift some documents to dense attention."""
    cost, base = counted(0.13), (8, 24)[seed % 2]
    tokens = crossing_tokens(cost, base, 2**15)
    choices = {"base_budget": base, "dense_up_to": tokens, "tuning": "raise"}
    return inputs(seed, cost, **choices | changes)


@pytest.mark.parametrize("lockstep_ranks", [1, 2])
def test_a_step_under_its_own_budgets_is_the_same_step(lockstep_ranks):
    """Budgets that an earlier plan raised to dense attention are pinned as that."""
    for seed in range(12):
        given = raised(seed, lockstep_ranks=lockstep_ranks)
        first = planned(**given)
        placement = tuple(
            tuple(each.samples for each in first.for_rank(rank).micro_batches)
            for rank in range(first.data_parallel_size)
        )
        again = planned(**given, placement=placement, pinned_LS=first.budgets_LS.astype(np.int64))
        for one, other in zip(first.micro_batches, again.micro_batches, strict=True):
            assert (one.dense_documents_L == other.dense_documents_L).all()
        assert again.expectation.makespan_ms == pytest.approx(
            first.expectation.makespan_ms, rel=1e-12
        )


def test_documents_that_ranks_share_become_dense_too():
    """By their length, or where their budget was raised to all blocks."""
    raised_to_dense = 0
    for seed, equal in itertools.product(range(12), (True, False)):
        given = raised(seed)
        job, changes = given["job"], {"max_tokens_per_micro_batch": 2**17}
        if job.data_parallel_size == 1:
            continue
        if equal:
            given |= {"job": replace(job, context_parallel_size=2)}
            changes["max_cp_size"] = 2
        else:
            changes |= {"context_parallel": "dynamic", "max_cp_size": 2}
        for micro_batch in planned(**changed(given, **changes)).micro_batches:
            if micro_batch.cp_size == 1:
                continue
            settings, lengths = given["plan_settings"], np.array(micro_batch.lengths_tokens)
            covered_LS = micro_batch.budgets_LS >= -(-lengths // settings.config.block_size)
            leading_LS = np.logical_and.accumulate(covered_LS, axis=1)
            assert (leading_LS.sum(axis=1) == micro_batch.dense_documents_L).all()
            raised_to_dense += (leading_LS & ~settings.dense_LS(job.layers, lengths)).sum()
    assert raised_to_dense


def test_lengths_by_hand():
    """There are blocks of 64, layers at 8, 4 and 40 blocks, and a dense one."""
    settings = plan_settings(layer_budgets="4:1 40:2 dense:3", dense_up_to=16 * 64)
    assert settings.dense_blocks_L(4).tolist()[:3] == [16, 8, 80]
    lengths = [1, 512, 513, 1024, 1025, 5120, 5121]
    base_LS = settings.base_LS(4, lengths)
    assert base_LS.tolist() == [
        [1, 8, 9, 16, 8, 8, 8],
        [1, 8, 4, 4, 4, 4, 4],
        [1, 8, 9, 16, 17, 80, 40],
        [1, 8, 9, 16, 17, 80, 81],
    ]
    assert settings.base_L(4)[3] == DENSE
    # A length within a block counts all of it.
    assert changed_settings(settings, dense_up_to=961).dense_blocks_L(4)[0] == 16
