# SPDX-License-Identifier: Apache-2.0
"""Generated lengths have the published shape; placements of other balancers keep their rules."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.lengths import LENGTHS, MAX_TOKENS, longalign_like
from simulated.peers import verl_placement
from simulated.setups import SETUPS

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.errors import PlanError
from sparsebalance_megatron.plan.job import Job
from sparsebalance_megatron.predict.comparison import EXACT, ROWS
from sparsebalance_megatron.predict.outcome import predict


@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.sampled_from([1, 4]))
def test_verl_places_every_sample_once_under_the_cap(seed: int, ranks: int, stages: int) -> None:
    generator = np.random.default_rng(seed)
    lengths = generator.integers(1, 1000, ranks * int(generator.integers(1, 12))).tolist()
    weights = [length + length**2 / 1000 for length in lengths]
    job = Job.even(layers=4, ranks=ranks, stages=stages)
    cap_tokens = 1000
    placement = verl_placement(weights, lengths, job, cap_tokens)
    assert len(placement) == ranks
    assert len({len(rank) for rank in placement}) == 1
    samples = list(chain.from_iterable(chain.from_iterable(placement)))
    assert sorted(samples) == list(range(len(lengths)))
    assert len({sum(map(len, rank)) for rank in placement}) == 1
    for rank in placement:
        ms = [sum(weights[sample] for sample in micro_batch) for micro_batch in rank]
        assert all(
            sum(lengths[sample] for sample in micro_batch) <= cap_tokens for micro_batch in rank
        )
        heaviest = int(np.argmax(ms))
        assert all(ms[i] <= ms[i + 1] for i in range(heaviest))
        assert all(ms[i] >= ms[i + 1] for i in range(heaviest, len(ms) - 1))
        assert heaviest == 0 or stages > 1


def test_a_sample_above_the_cap_fits_nowhere() -> None:
    job = Job.even(layers=1, ranks=2, stages=1)
    with pytest.raises(PlanError, match="up to 2 keeps to 4 tokens"):
        verl_placement([9.0, 1.0, 1.0, 1.0], [9, 1, 1, 1], job, 4)


@pytest.mark.parametrize("name", ["paper-main", "paper-ablation", "packed", "lockstep-pipeline"])
def test_fixed_budgets_are_never_slower_than_dense_attention(name: str) -> None:
    """At our placement; documents are dense up to the length where times cross."""
    setup = SETUPS[name]
    for data in setup.data:
        for sparse in (0.05, 0.13, 0.36, 0.6):
            given = setup.workload(
                data, steps=1, seed=1, config=SparseBalanceConfig(), sparse_efficiency=sparse
            )
            ours, exact = (predict(ROWS[row].of(given)) for row in ("fixed budgets", EXACT))
            assert ours.makespan_ms <= 1.005 * exact.makespan_ms, (data, sparse)


@pytest.mark.parametrize("name", LENGTHS)
def test_seeded_and_in_range(name):
    generate = LENGTHS[name]
    lengths = generate(5000, 3)
    assert lengths.dtype == np.int64
    most_tokens = 2 * MAX_TOKENS if name.endswith("128k") else MAX_TOKENS
    assert 1 <= lengths.min() <= lengths.max() <= most_tokens
    assert (generate(5000, 3) == lengths).all()
    assert (generate(5000, 4) != lengths).mean() > 0.9


def test_longalign_matches_the_published_fit():
    lengths = longalign_like(200_000, 0)
    assert lengths.min() >= 8192
    assert 22_000 <= lengths.mean() <= 23_500
    assert 0.58 <= (lengths >= 16384).mean() <= 0.62
    assert 0.18 <= (lengths >= 32768).mean() <= 0.22


@pytest.mark.parametrize(("name", "longest"), [("chatqa2", 32768), ("chatqa2-tail", MAX_TOKENS)])
def test_chatqa2_is_bimodal(name, longest):
    lengths = LENGTHS[name](100_000, 0)
    assert (lengths < 4096).mean() == pytest.approx(0.5, abs=0.01)
    assert (lengths >= 16384).mean() == pytest.approx(0.5, abs=0.01)
    assert 0.95 * longest < lengths.max() <= longest
