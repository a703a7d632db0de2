# SPDX-License-Identifier: Apache-2.0
"""Generated lengths have the published shape, and sparse attention is no slower than dense."""

from dataclasses import replace

import numpy as np
import pytest
from simulated.lengths import LENGTHS, MAX_TOKENS, longalign_like
from simulated.setups import SETUPS, WINDOW_SETUPS

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.dense_length import with_dense_length
from sparsebalance_megatron.predict.comparison import EXACT, ROWS, window_lines
from sparsebalance_megatron.predict.outcome import predict


@pytest.mark.parametrize("name", ["paper-main", "paper-ablation", "packed", "lockstep-pipeline"])
def test_fixed_budgets_are_never_slower_than_dense_attention(name: str) -> None:
    """At our placement, where dense documents run as fast as the model's own attention; they are
    dense up to the length where times cross."""
    config = SparseBalanceConfig()
    setup = SETUPS[name]
    for data in setup.data:
        for sparse in (0.05, 0.13, 0.36, 0.6):
            given = setup.workload(data, steps=1, seed=1, config=config, sparse_efficiency=sparse)
            cost = given.cost.with_model_attention
            tokens = with_dense_length(config, cost, MAX_TOKENS).dense_up_to_tokens
            settings = given.plan_settings.with_dense_length(tokens)
            given = replace(given, cost=cost, plan_settings=settings)
            ours, exact = (predict(ROWS[row].of(given)) for row in ("fixed budgets", EXACT))
            assert ours.makespan_ms <= 1.005 * exact.makespan_ms, (data, sparse)


@pytest.mark.parametrize("name", WINDOW_SETUPS)
def test_windows_gain_where_ranks_have_few_samples(name: str) -> None:
    """So the start of a run names what they would give."""
    setup = WINDOW_SETUPS[name]
    exact = SparseBalanceConfig(layer_budgets="dense:all", tuning="off")
    (line,) = window_lines(setup.workload("longalign", steps=8, seed=0, config=exact))
    assert "--sparse-balance-window 4" in line


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
