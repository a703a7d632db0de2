# SPDX-License-Identifier: Apache-2.0
"""What waiting inside shared micro-batches leaves of measured times, and what these teach."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cost.cost_cases import Times
from hypothesis import given, settings
from hypothesis import strategies as st
from step_cases import step_measurement

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.learn.measurement import PASSES, lockstep_waiting
from sparsebalance_megatron.learn.step_planner import Calibration, DeviceSlowness
from sparsebalance_megatron.plan.step_plan import MicroBatchPlan

SHAPE_RPVM = (4, 2, 1, 6)


def micro_batches(cp_sizes_RM: np.ndarray) -> list[MicroBatchPlan]:
    """One micro-batch for every group of ranks at every position."""
    return [
        MicroBatchPlan(
            samples=(0,),
            lengths_tokens=(1,),
            budgets_LS=np.ones((1, 1), dtype=np.int32),
            rank=rank,
            position=position,
            cp_size=int(cp_size),
        )
        for (rank, position), cp_size in np.ndenumerate(cp_sizes_RM)
        if rank % cp_size == 0
    ]


def drawn_cp_sizes(generator: np.random.Generator) -> np.ndarray:
    """Pairs of ranks, at most positions, share or do not."""
    pairs_WM = generator.choice([1, 2], (SHAPE_RPVM[0] // 2, SHAPE_RPVM[-1]))
    return np.repeat(pairs_WM, 2, axis=0)


@given(st.integers(0, 2**32 - 1), st.floats(0.0, 0.3))
def test_a_shared_micro_batch_takes_what_its_last_rank_took(seed: int, missing: float) -> None:
    generator = np.random.default_rng(seed)
    cp_sizes_RM = drawn_cp_sizes(generator)
    times_2RPVM = generator.uniform(1.0, 9.0, (2, *SHAPE_RPVM))
    times_2RPVM[generator.random(times_2RPVM.shape) < missing] = np.nan
    before = times_2RPVM.copy()
    found = step_measurement(times_2RPVM).without_waiting(micro_batches(cp_sizes_RM)).times_2RPVM
    np.testing.assert_array_equal(times_2RPVM, before)
    for direction, rank, stage, chunk, position in np.ndindex(before.shape):
        first = rank - rank % cp_sizes_RM[rank, position]
        members = range(first, first + cp_sizes_RM[rank, position])
        known = [before[direction, r, stage, chunk, position] for r in members]
        known = [value for value in known if not np.isnan(value)]
        value = found[direction, rank, stage, chunk, position]
        assert np.isnan(value) if not known else value == min(known)


def test_a_step_without_shared_micro_batches_stays_as_it_is() -> None:
    measured = step_measurement(np.ones((2, *SHAPE_RPVM)))
    assert measured.without_waiting(micro_batches(np.ones((4, 6), dtype=np.int64))) is measured


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 1.3, 1.6]))
def test_members_that_wait_are_not_taken_for_slow_devices(seed: int, factor: float) -> None:
    """One device is slower, or none; every second rank comes early to shared micro-batches."""
    generator = np.random.default_rng(seed)
    learner = DeviceSlowness(*SHAPE_RPVM[:2])
    slowness_RP = np.ones(SHAPE_RPVM[:2])
    slowness_RP[2, 1] = factor
    for _ in range(60):
        cp_sizes_RM = drawn_cp_sizes(generator)
        shared_RPVM = np.broadcast_to((cp_sizes_RM > 1)[:, None, None], SHAPE_RPVM)
        work_2RPVM = generator.uniform(1.0, 50.0, (2, *SHAPE_RPVM))
        work_2RPVM = np.where(shared_RPVM, pairs(work_2RPVM, np.max), work_2RPVM)
        early_2RPVM = np.where(shared_RPVM, generator.exponential(20.0, work_2RPVM.shape), 0.0)
        early_2RPVM[:, 1::2] = 0.0
        noise_2RPVM = np.exp(0.02 * generator.standard_normal(work_2RPVM.shape))
        measured = step_measurement(
            1.3 * in_step(work_2RPVM, slowness_RP, shared_RPVM) * noise_2RPVM + early_2RPVM
        ).without_waiting(micro_batches(cp_sizes_RM))
        scales = StageScales.of(np.ones((2, *SHAPE_RPVM[1:3])), learner.snapshot())
        predicted_2RPVM = in_step(work_2RPVM, learner.snapshot(), shared_RPVM)
        learner.update(Times(predicted_2RPVM, scales), Times(measured.times_2RPVM, scales))
    found_RP = learner.snapshot()
    assert found_RP[2, 1] == pytest.approx(factor, rel=0.05)
    found_RP[2, 1] = 1.0
    assert np.abs(found_RP - 1.0).max() <= 0.04


def in_step(work_2RPVM: np.ndarray, slowness_RP: np.ndarray, shared_RPVM: np.ndarray) -> np.ndarray:
    """Times on devices so slow; those of shared micro-batches are as long as on the slowest."""
    times_2RPVM = work_2RPVM * slowness_RP[..., None, None]
    return np.where(shared_RPVM, pairs(times_2RPVM, np.max), times_2RPVM)


def pairs(values_2RPVM: np.ndarray, reduce: np.ufunc) -> np.ndarray:
    """Reduce over each pair of neighbouring ranks, for both of them."""
    by_pair = values_2RPVM.reshape(2, SHAPE_RPVM[0] // 2, 2, *SHAPE_RPVM[1:])
    return np.repeat(reduce(by_pair, axis=2), 2, axis=1)


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]))
def test_whoever_comes_last_to_a_collective_waits_for_nobody(seed: int, members: int) -> None:
    """Ranks compute, meet, and go on together; the exchange itself takes all of them as long."""
    generator = np.random.default_rng(seed)
    ranks, shape = 4, (1, 2, 3, 2, 5, PASSES)
    work = generator.uniform(0.0, 9.0, (ranks // members, members, *shape))
    exchange = generator.uniform(0.0, 1.0, (ranks // members, 1, *shape))
    inside = work.max(axis=1, keepdims=True) - work + exchange
    inside_RPVMYXZ, own_RPVMYXZ = (
        each.reshape(ranks, *shape) for each in (inside, work + exchange)
    )

    def in_all(times_RPVMYXZ: np.ndarray) -> np.ndarray:
        of_passes = times_RPVMYXZ.sum(axis=(-3, -2))
        return np.stack([of_passes[..., 0], of_passes[..., 1:].sum(axis=-1)])

    passed_2RPVM = in_all((work + inside).reshape(ranks, *shape))
    waiting_2RPVM = lockstep_waiting(inside_RPVMYXZ, members)
    np.testing.assert_allclose(passed_2RPVM - waiting_2RPVM, in_all(own_RPVMYXZ))

    inside_RPVMYXZ[0, 0, 0, 0, 0, 0, 0] = np.nan
    unknown = np.isnan(lockstep_waiting(inside_RPVMYXZ, members))
    assert unknown[0, :members, 0, 0, 0].all()
    assert unknown.sum() == members


@pytest.mark.parametrize("factor", [1.0, 1.6])
def test_a_slow_device_of_a_lockstep_group_is_found_by_own_times(factor: float) -> None:
    """All ranks are one group, and every operation takes them as long as its slowest member."""
    generator = np.random.default_rng(5)
    slowness, calibration = DeviceSlowness(*SHAPE_RPVM[:2]), Calibration(*SHAPE_RPVM[1:3])
    slowness_RP = np.ones(SHAPE_RPVM[:2])
    slowness_RP[2, 1] = factor
    for _ in range(20):
        work_2RPVM = generator.uniform(1.0, 50.0, (2, *SHAPE_RPVM))
        own_2RPVM = 1.3 * work_2RPVM * slowness_RP[..., None, None]
        own_2RPVM *= np.exp(0.02 * generator.standard_normal(work_2RPVM.shape))
        passed_2RPVM = np.broadcast_to(own_2RPVM.max(axis=1, keepdims=True), own_2RPVM.shape)
        measured = step_measurement(passed_2RPVM)
        measured = replace(measured, waiting_2RPVM=passed_2RPVM - own_2RPVM)
        scales = replace(calibration.snapshot(), slowness_RP=slowness.snapshot())
        planned = Times(work_2RPVM * scales.factors_2RPV[..., None], scales)
        slowness.update(planned, measured)
        calibration.update(planned, measured)
    assert slowness.snapshot()[2, 1] == pytest.approx(factor, rel=0.05)
    assert calibration.snapshot().scales_2PV == pytest.approx(1.3, rel=0.1)
