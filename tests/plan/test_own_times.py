# SPDX-License-Identifier: Apache-2.0
"""Own times of ranks that wait for one another in every layer, against sums by hand.

Shape legend: S samples, C chunks of all stages, R data-parallel ranks, P pipeline stages, V virtual
stages, M micro-batches; a leading 2: forward and backward.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan.plan_cases import cost_model, job_shape, placed, random_lengths, with_experts

from sparsebalance_megatron.cost.stage_scales import StageScales
from sparsebalance_megatron.plan.lockstep_times import own_times
from sparsebalance_megatron.plan.step_costs import step_costs


@given(
    st.sampled_from([(4, 3, 1, 1), (4, 2, 2, 2), (2, 5, 3, 1)]),
    st.sampled_from([2, 4]),
    st.integers(0, 2**32 - 1),
)
def test_experts_of_a_rank_compute_an_equal_share_of_its_groups_samples(shape, members, seed):
    ranks, positions, stages, chunks = shape
    members = min(members, ranks)
    job = replace(job_shape(*shape), lockstep_ranks=members)
    generator = np.random.default_rng(seed)
    slowness_RP = generator.uniform(0.8, 1.3, (ranks, stages))
    scales = replace(StageScales.ones(stages, chunks), slowness_RP=slowness_RP)
    samples = 2 * job.places
    costs = step_costs(random_lengths(samples, seed, longest=4096), job, cost_model(), scales)
    together_2SC = generator.uniform(0.0, 9.0, (2, samples, stages * chunks))
    costs = with_experts(costs, together_2SC)
    micro_batch_of_S = generator.permutation(np.repeat(np.arange(job.places), 2))
    times_2RPVM = generator.uniform(100.0, 200.0, (2, ranks, stages, chunks, positions))
    found = own_times(costs, times_2RPVM, placed(micro_batch_of_S, job))
    for place in np.ndindex(times_2RPVM.shape):
        direction, rank, stage, chunk, position = place
        # Of every rank, at this position.
        experts_R = [
            together_2SC[
                direction, micro_batch_of_S == each * positions + position, stage * chunks + chunk
            ].sum()
            for each in range(ranks)
        ]
        first = rank - rank % members
        share = np.mean(experts_R[first : first + members])
        expected = times_2RPVM[place] + slowness_RP[rank, stage] * (share - experts_R[rank])
        assert found[place] == pytest.approx(expected)
