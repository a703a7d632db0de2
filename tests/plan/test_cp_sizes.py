# SPDX-License-Identifier: Apache-2.0
"""Micro-batches that ranks share: who they are, when they run, and plans of all cp_sizes."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.plan_cases import (
    changed_settings,
    cost_model,
    flat,
    job_shape,
    longest_through,
    planned,
    random_cp_sizes,
    random_lengths,
    shared_times,
    step_inputs,
)

from sparsebalance_megatron.cost.exchange import Exchange
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan import candidates
from sparsebalance_megatron.plan.pipeline.simulator import makespans_ms

SEEDS = st.integers(0, 2**32 - 1)
SHAPES = st.sampled_from([(4, 4, 2, 1), (8, 2, 1, 1), (4, 4, 2, 2), (2, 3, 4, 1), (4, 1, 1, 1)])


def arguments(shape, seed, *, size=2, kind="spread", **changes):
    job = replace(job_shape(*shape), context_parallel_size=changes.pop("c", 1))
    samples = job.places * size // job.context_parallel_size
    lengths = random_lengths(samples, seed, kind=kind, longest=2**15)
    cost = replace(cost_model(), exchange=Exchange(bytes_per_token=512.0))
    return step_inputs(job, lengths, seed, cost=cost, **{"plan_ms": 1.0} | changes)


@settings(max_examples=15)
@given(SHAPES, SEEDS)
def test_the_longest_chain_through_a_shared_micro_batch(shape, seed):
    """One that grows by less than the chain lacks delays no rank; by more it delays one."""
    ranks, positions, _, _ = shape
    cp_sizes_RM = random_cp_sizes(ranks, positions, ranks, seed)
    times = shared_times(shape, cp_sizes_RM, seed)
    step_ms = makespans_ms(flat(times, cp_sizes_RM=cp_sizes_RM)).max()
    through = longest_through(flat(times, cp_sizes_RM=cp_sizes_RM))
    assert through.max() == pytest.approx(step_ms)
    r, m = seed % ranks, seed % positions
    first = r // cp_sizes_RM[r, m] * cp_sizes_RM[r, m]
    members = slice(first, first + cp_sizes_RM[r, m])
    assert np.ptp(through[members, ..., m], axis=0).max() == pytest.approx(0.0, abs=1e-9)
    slack_ms = step_ms - through[r, 0, 0, m]
    for added_ms, same in ((0.99 * slack_ms, True), (slack_ms + 0.5, False)):
        grown_ms = []
        for direction in (0, 1):
            grown = times.copy()
            grown[direction, members, 0, 0, m] += added_ms
            grown_ms.append(makespans_ms(flat(grown, cp_sizes_RM=cp_sizes_RM)).max())
        assert (max(grown_ms) <= step_ms * (1 + 1e-9)) == same


def test_a_shared_micro_batch_holds_its_cap_for_every_rank():
    given_ = arguments(
        (2, 1),
        0,
        context_parallel="dynamic",
        max_cp_size=2,
        max_tokens_per_micro_batch=1000,
    )
    (micro_batch,) = planned(**given_ | {"lengths_tokens": [1900, 100]}).micro_batches
    assert (micro_batch.cp_size, sorted(micro_batch.lengths_tokens)) == (2, [100, 1900])
    with pytest.raises(
        PlanError, match=r"101 tokens.*fits in no micro-batch of 1000 tokens per rank"
    ):
        planned(**given_ | {"lengths_tokens": [1900, 101]})


@pytest.mark.parametrize(("beyond_two", "most_ranks"), [(1.0, 4), (1e6, 2)])
def test_micro_batches_stay_where_bytes_are_fast(beyond_two: float, most_ranks: int):
    """A long sample lies on all ranks, unless the network between pairs of them is slow."""
    given_ = arguments((4, 4), 0, size=4, tuning="off")
    given_["lengths_tokens"] = [60000, *[600] * 63]
    given_["plan_settings"] = changed_settings(
        given_["plan_settings"], context_parallel="dynamic", max_cp_size=4
    )
    exchange = Exchange(
        bytes_per_token=1.0,
        gradient_bytes_per_token=2.0,
        ms_per_byte=1e-6,
        cp_size_slowness=((2, 1.0), (4, beyond_two)),
    )
    plan = planned(**given_ | {"cost": replace(given_["cost"], exchange=exchange)})
    assert max(micro_batch.cp_size for micro_batch in plan.micro_batches) == most_ranks


def test_cp_sizes_are_not_searched_where_equal_ones_are_at_the_bound(monkeypatch):
    """Samples alike in length, one for every place and many places: nothing is left to gain."""
    given_ = arguments((4, 32, 2, 1), 0, size=1, kind="equal")
    dynamic = changed_settings(given_["plan_settings"], context_parallel="dynamic", max_cp_size=4)
    equal = planned(**given_)
    monkeypatch.setattr(candidates, "cp_size_start", unwanted := Mock())
    free = planned(**given_ | {"plan_settings": dynamic})
    assert free.digest() == equal.digest()
    unwanted.assert_not_called()
