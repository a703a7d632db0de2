# SPDX-License-Identifier: Apache-2.0
"""What sharing a row costs: bytes from shapes, time from measurements or a bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from sparsebalance_megatron.cost.exchange import (
    Exchange,
    gigabytes_per_second,
    ms_per_byte,
    received_bytes,
)
from sparsebalance_megatron.cost.fit import fit_cost_model
from sparsebalance_megatron.cost.parts import Direction
from sparsebalance_megatron.cost.table import CostTable, ExchangeRow


def test_bytes_of_keys_values_and_gradients() -> None:
    exchange = Exchange.of(2 * 2 * 128)
    assert exchange.bytes_per_token == 2 * 2 * 128 * 2
    assert exchange.gradient_bytes_per_token == 2 * 2 * 128 * 4
    assert Exchange.of(2 * 2 * 128, "float32").bytes_per_token == 2 * 2 * 128 * 4
    assert received_bytes(1000, 4, exchange.bytes_per_token) == 750 * 1024


def test_the_nominal_bandwidth_in_both_units() -> None:
    assert ms_per_byte(50.0) == pytest.approx(1e3 / 50e9)
    assert gigabytes_per_second(ms_per_byte(200.0)) == pytest.approx(200.0)


def test_a_backward_gathers_again_and_scatters() -> None:
    exchange = Exchange(bytes_per_token=1e6, gradient_bytes_per_token=2e6, ms_per_byte=1e-6)
    assert exchange.ms_per_token(Direction.FORWARD) == pytest.approx(1.0)
    assert exchange.ms_per_token(Direction.BACKWARD) == pytest.approx(3.0)


def test_shares_of_the_work() -> None:
    exchange = Exchange(loss=0.05)
    assert [exchange.share(width) for width in (1, 2, 4)] == [1.0, 0.525, 0.2625]


def test_measured_exchanges_give_the_time_of_a_byte(measure: Callable[..., CostTable]) -> None:
    """Relative errors count: the time lies between those of the two measurements."""
    assert fit_cost_model(measure()).exchange.ms_per_byte == ms_per_byte(50.0)
    rows = tuple(
        ExchangeRow(width=2, received_bytes=size, ms_median=ms, ms_spread=0.0, repeats=3)
        for size, ms in ((1_000_000, 0.1), (4_000_000, 0.32))
    )
    for chosen, lowest, highest in ((rows[:1], 1e-7, 1e-7), (rows, 0.8e-7, 1e-7)):
        fitted = fit_cost_model(replace(measure(), exchanges=chosen)).exchange.ms_per_byte
        assert lowest * (1 - 1e-5) <= fitted <= highest * (1 + 1e-5)
    faster = fit_cost_model(measure()).with_bandwidth(200.0)
    assert faster.exchange.ms_per_byte == pytest.approx(ms_per_byte(50.0) / 4)


def test_groups_that_reach_beyond_a_node_are_slower(measure: Callable[..., CostTable]) -> None:
    """A byte takes as long in a group of a size as was measured there."""
    rows = tuple(
        ExchangeRow(width=width, received_bytes=10**6, ms_median=ms, ms_spread=0.0, repeats=3)
        for width, ms in ((8, 0.4), (2, 0.01), (4, 0.012))
    )
    model = fit_cost_model(replace(measure(), exchanges=rows))
    assert model.exchange.ms_per_byte == 1e-8
    shares = [model.exchange.received_share(width) for width in (1, 2, 3, 4, 8, 16)]
    assert shares == pytest.approx([0, 1 / 2, 1.2 * 2 / 3, 1.2 * 3 / 4, 40 * 7 / 8, 40 * 15 / 16])
    assert model.with_bandwidth(50.0).exchange.received_share(8) == 7 / 8
