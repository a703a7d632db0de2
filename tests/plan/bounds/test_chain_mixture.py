# SPDX-License-Identifier: Apache-2.0
"""Mixed chains: no pipeline is shorter, and the best split of its work is hardly longer."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.dealing import best_dealt_makespan
from plan.plan_cases import flat

from sparsebalance_megatron.plan.bounds.chain_mixture import chain_mixture
from sparsebalance_megatron.plan.pipeline.orders import megatron_order
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms

SHAPES = [(1, 1, 3), (2, 1, 4), (3, 1, 5), (4, 1, 8), (2, 2, 4)]
"""Stages, virtual stages, micro-batches."""


def profile(stages: int, virtual_stages: int, heavy: float) -> np.ndarray:
    """Backwards twice as long as forwards, and a last chunk with the head."""
    work_2PV = np.ones((2, stages, virtual_stages))
    work_2PV[1] *= 2.0
    work_2PV[:, -1, -1] *= heavy
    return work_2PV


@settings(max_examples=20)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_no_pipeline_is_shorter_than_the_mixture(shape: tuple[int, int, int], seed: int) -> None:
    """Whatever the times, those of another profile included."""
    *stages, micro_batches = shape
    mixture_2PVM = chain_mixture(profile(*stages, 1.25), micro_batches, megatron_order)
    times_2PVM = np.random.default_rng(seed).exponential(1.0, (2, *shape))
    makespan_ms = float(makespans_ms(flat(times_2PVM[:, None]))[0])
    assert (times_2PVM * mixture_2PVM).sum() <= makespan_ms * (1 + 1e-12)


@pytest.mark.parametrize("heavy", [1.0, 1.25])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_as_long_as_the_best_dealt_work(shape: tuple[int, int, int], heavy: float) -> None:
    """One rank's work in any parts to its micro-batches: a linear program."""
    *stages, micro_batches = shape
    work_2PV = profile(*stages, heavy)
    mixture_2PVM = chain_mixture(work_2PV, micro_batches, megatron_order)
    least = (mixture_2PVM * work_2PV[..., None]).sum(axis=(0, 1, 2)).min()
    best = best_dealt_makespan(work_2PV.tolist(), micro_batches)
    assert 0.97 * best <= least <= best * (1 + 1e-9)


def test_one_mixture_serves_steps_that_differ_little() -> None:
    work_2PV = profile(2, 1, 1.25)
    assert chain_mixture(work_2PV, 4, megatron_order) is chain_mixture(
        7.0 * work_2PV * 1.001, 4, megatron_order
    )
