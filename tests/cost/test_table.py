# SPDX-License-Identifier: Apache-2.0
"""Tables survive the disk unchanged; damaged or foreign ones are refused by name."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from sparsebalance_megatron.cost.fit import fit_cost_model
from sparsebalance_megatron.cost.parts import Direction, Part, SegmentCost
from sparsebalance_megatron.cost.table import CostTable, CostTableError, ExchangeRow, RunIdentity

Measure = Callable[..., CostTable]
EXCHANGES = (
    ExchangeRow(width=2, received_bytes=4_000_000, ms_median=0.1, ms_spread=0.0, repeats=5),
    ExchangeRow(width=4, received_bytes=6_000_000, ms_median=0.15, ms_spread=0.01, repeats=5),
)


def test_save_and_load_round_trip_exactly(tmp_path: Path, measure: Measure) -> None:
    """Also over an old file; what a table lacks is the default, and a bad one is not written."""
    path = tmp_path / "table.json"
    path.write_text("old")
    table = replace(
        measure(noise=0.1),
        exchanges=EXCHANGES,
        segments=SegmentCost(slowness=1.2, operation_ms=(0.1, 0.4)),
    )
    table.save(path)
    loaded = CostTable.load(path)
    assert loaded == table and loaded.path == str(path)
    assert fit_cost_model(loaded).segments == table.segments
    rows = (msgspec.structs.replace(table.rows[0], ms_median=float("nan")), *table.rows[1:])
    with pytest.raises(CostTableError, match=r"rows\[0\].ms_median nan"):
        replace(table, rows=rows).save(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]
    assert CostTable.load(path) == table
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"segments": {"slowness": 0.5}}))
    with pytest.raises(CostTableError, match=r"slowness 0.5"):
        CostTable.load(path)
    del document["exchanges"], document["segments"]
    path.write_text(json.dumps(document))
    loaded = CostTable.load(path)
    assert loaded.exchanges == () and fit_cost_model(loaded).segments == SegmentCost()


@pytest.mark.parametrize("timed", [{"flash": 1.0}, {"flash": 2.0, "triton": 1.0}, {}, 3])
def test_a_table_measured_with_flash_is_refused(
    timed: object, tmp_path: Path, measure: Measure
) -> None:
    path = tmp_path / "table.json"
    measure().save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"attention_ms": timed}))
    if timed == {"flash": 1.0}:
        with pytest.raises(CostTableError, match=r"table\.json: measured with attention flash"):
            CostTable.load(path)
    else:
        assert replace(CostTable.load(path), path=None) == measure()


def test_only_the_router_may_lack_backward_rows(measure: Measure) -> None:
    table = measure()
    table.validate()
    rows = tuple(
        row for row in table.rows if (row.part, row.direction) != (Part.LINEAR, Direction.BACKWARD)
    )
    with pytest.raises(CostTableError, match="no row for linear backward"):
        replace(table, rows=rows).validate()


def test_every_differing_field_is_named_with_both_values(
    measure: Measure, identity: RunIdentity
) -> None:
    measure().check_matches(identity.flat())
    measure().check_matches({"block_size": 128})
    shape = replace(identity.shape, hidden_size=2048)
    run = replace(identity, device="NVIDIA H200", shape=shape)
    with pytest.raises(CostTableError) as caught:
        measure().check_matches(run.flat())
    for difference in (
        "device is cpu in the table, NVIDIA H200 in this run",
        "shape.hidden_size is 256 in the table, 2048 in this run",
    ):
        assert difference in str(caught.value)
    assert "selection" not in str(caught.value)
