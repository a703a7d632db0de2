# SPDX-License-Identifier: Apache-2.0
"""A fit recovers what was planted, predicts measured latencies, and says where it is doubtful;
what sharing a sequence costs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cost.cost_cases import IDENTITY, PLANTED, planted_table
from step_cases import SHAPE

from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.cost.exchange import Exchange, gigabytes_per_second, ms_per_byte
from sparsebalance_megatron.cost.fit import (
    configured_cost_model,
    doubts,
    fit_cost_model,
    fit_errors,
    held_out_errors,
)
from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import CostTableError, ExchangeRow


def test_fit_recovers_planted_coefficients() -> None:
    fitted = fit_cost_model(planted_table())
    for direction in Direction:
        for part in (part for part in Part if part is not Part.EXPERTS):
            np.testing.assert_allclose(
                fitted.coefficients_ms(part, direction),
                PLANTED.coefficients_ms(part, direction),
                rtol=1e-5,  # of which rounding to six digits takes half
                atol=1e-12,
                err_msg=f"{part} {direction}",
            )


def test_fit_error_is_that_of_the_noise() -> None:
    table = planted_table(noise=0.05)
    errors = fit_errors(fit_cost_model(table), table)
    assert set(errors) == {(row.part, row.direction) for row in table.rows}
    attention = errors[Part.ATTENTION, Direction.FORWARD]
    assert len(attention) == 32
    assert 0.01 < np.median(attention) < 0.05
    assert np.quantile(attention, 0.95) < 0.2


def test_held_out_error_is_zero_without_noise_and_sees_what_a_fit_hides() -> None:
    clean = planted_table()
    assert all(errors.max() < 1e-4 for errors in held_out_errors(clean).values())
    rows = list(clean.rows)
    index = next(i for i, row in enumerate(rows) if row.part is Part.HEAD)
    rows[index] = msgspec.structs.replace(rows[index], ms_median=rows[index].ms_median * 1.5)
    bent = replace(clean, rows=tuple(rows))
    key = (Part.HEAD, rows[index].direction)
    hidden, held_out = fit_errors(fit_cost_model(bent), bent)[key], held_out_errors(bent)[key]
    assert np.quantile(held_out, 0.95) > np.quantile(hidden, 0.95)
    assert len(held_out) == len(hidden)


def test_a_table_that_cannot_be_fitted_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def gives_up(*_: object) -> None:
        raise RuntimeError("too many iterations")

    monkeypatch.setattr("scipy.optimize.nnls", gives_up)
    with pytest.raises(CostTableError, match=r"cannot be fitted \(too many iterations\)"):
        fit_cost_model(planted_table())


def test_one_size_only() -> None:
    table = planted_table(noise=0.1)
    assert doubts(table, fit_cost_model(table)) == ()
    lengths = table.rows[0].lengths_tokens
    table = replace(table, rows=tuple(r for r in table.rows if r.lengths_tokens == lengths))
    (doubt,) = doubts(table, fit_cost_model(table))
    assert "measured at one size only" in doubt
    assert "attention forward, router forward" in doubt


def test_times_that_fall_where_the_work_grows() -> None:
    table = planted_table()
    rows = tuple(msgspec.structs.replace(row, ms_median=1.0 / row.ms_median) for row in table.rows)
    table = replace(table, rows=rows, path="fallen.json")
    (doubt,) = doubts(table, fit_cost_model(table))
    assert doubt.startswith("cost table fallen.json: times do not grow as work does")


def test_what_sharing_a_sequence_takes_by_hand() -> None:
    """Two KV heads of one of two tensor-parallel ranks."""
    shape = replace(SHAPE, num_query_groups=4, head_dim=128, tensor_parallel_size=2)
    exchange = Exchange.of(shape)
    assert exchange.bytes_per_token == 2 * 2 * 128 * 2
    assert exchange.gradient_bytes_per_token == 2 * 2 * 128 * 4
    assert (exchange.query_heads, exchange.kv_heads) == (2, 2)
    assert Exchange.of(shape, "float32").bytes_per_token == 2 * 2 * 128 * 4
    assert exchange.received_share(4) == 0.75
    assert ms_per_byte(50.0) == pytest.approx(1e3 / 50e9)
    assert gigabytes_per_second(ms_per_byte(200.0)) == pytest.approx(200.0)
    # A backward gathers again and scatters.
    exchange = Exchange(bytes_per_token=1e6, gradient_bytes_per_token=2e6, ms_per_byte=1e-6)
    assert exchange.ms_per_token(Direction.FORWARD) == pytest.approx(1.0)
    assert exchange.ms_per_token(Direction.BACKWARD) == pytest.approx(3.0)
    assert [Exchange(loss=0.05).share(width) for width in (1, 2, 4)] == [1.0, 0.525, 0.2625]


def test_heads_travel_for_lists_where_that_is_shorter() -> None:
    """In bfloat16 a gather takes 4 of the keys' and values' bytes forward and backward, and 5 with
    recomputation; heads take 2 or 3 times (32 + 8) / 8 divided by the ranks."""
    shape = replace(SHAPE, num_attention_heads=32, num_query_groups=8, head_dim=128)
    exchange = replace(Exchange.of(shape), heads_within=8)
    for repeated, served in ((False, [4, 8]), (True, [4, 8])):
        exchange = replace(exchange, repeated=repeated)
        assert [cp for cp in (1, 2, 4, 8, 16) if exchange.lists_by_heads(cp)] == served
    received = exchange.heads_ms_per_token(4) / exchange.ms_per_byte / exchange.bytes_per_token
    assert received == pytest.approx(40 / 8 / 4 * 3 / 4)
    # Each rank of a group of 2 has all query heads of a KV head, of 4 it has not.
    latent = replace(exchange, query_heads=8, kv_heads=2)
    assert [cp for cp in (2, 4, 8) if latent.lists_by_heads(cp)] == []
    many = replace(exchange, query_heads=8, kv_heads=8, heads_within=4)
    assert [cp for cp in (2, 4, 8) if many.lists_by_heads(cp)] == [2, 4]


def test_heads_that_cannot_be_divided_are_named() -> None:
    def obstacle(cp_size: int, query_heads: int, kv_heads: int) -> str:
        heads = Exchange(query_heads=query_heads, kv_heads=kv_heads, heads_within=4)
        return str(heads.heads_obstacle(cp_size))

    assert obstacle(4, 8, 2) == obstacle(2, 8, 4) == "None"
    assert "6 query heads" in obstacle(4, 6, 2)
    assert "3 KV heads" in obstacle(2, 6, 3)
    assert "4 ranks at most" in obstacle(8, 8, 8)


def test_measured_exchanges_give_the_time_of_a_byte() -> None:
    """Relative errors count: the time lies between those of the two measurements."""
    assert fit_cost_model(planted_table()).exchange.ms_per_byte == ms_per_byte(45.0)
    rows = tuple(
        ExchangeRow(width=2, received_bytes=size, ms_median=ms, ms_spread=0.0, repeats=3)
        for size, ms in ((1_000_000, 0.1), (4_000_000, 0.32))
    )
    for chosen, lowest, highest in ((rows[:1], 1e-7, 1e-7), (rows, 0.8e-7, 1e-7)):
        fitted = fit_cost_model(replace(planted_table(), exchanges=chosen)).exchange.ms_per_byte
        assert lowest * (1 - 1e-5) <= fitted <= highest * (1 + 1e-5)
    faster = fit_cost_model(planted_table()).with_bandwidth(200.0)
    assert faster.exchange.ms_per_byte == pytest.approx(ms_per_byte(50.0) / 4)


def test_groups_that_reach_beyond_a_node_are_slower() -> None:
    """A byte takes as long in a group of a size as was measured there."""
    rows = tuple(
        ExchangeRow(width=width, received_bytes=10**6, ms_median=ms, ms_spread=0.0, repeats=3)
        for width, ms in ((8, 0.4), (2, 0.01), (4, 0.012))
    )
    model = fit_cost_model(replace(planted_table(), exchanges=rows))
    assert model.exchange.ms_per_byte == 1e-8
    shares = [model.exchange.received_share(width) for width in (1, 2, 3, 4, 8, 16)]
    assert shares == pytest.approx([0, 1 / 2, 1.2 * 2 / 3, 1.2 * 3 / 4, 40 * 7 / 8, 40 * 15 / 16])
    assert model.with_bandwidth(50.0).exchange.received_share(8) == 7 / 8


def test_a_table_of_another_selection_serves_dense_attention_alone(tmp_path: Path) -> None:
    table = planted_table()
    (path := tmp_path / "table.json").write_text(table.text())
    how: dict[str, Any] = {"block_size": IDENTITY.block_size, "cost_table": str(path)}
    run = {"device": IDENTITY.device, "dtype": IDENTITY.dtype}
    exact = SparseBalanceConfig(**how, layer_budgets="dense:all", tuning="off")
    assert configured_cost_model(exact, IDENTITY.shape, run).source
    with pytest.raises(CostTableError, match="selection is previous-block in the table"):
        configured_cost_model(SparseBalanceConfig(**how), IDENTITY.shape, run)
