# SPDX-License-Identifier: Apache-2.0
"""Tables survive the disk unchanged; those that are damaged, foreign, or not to be believed are
refused by name."""

import json
import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bad_inputs.judge import bounded, check_refused
from cost.cost_cases import IDENTITY, planted_table

from sparsebalance_megatron.cost.fit import fit_cost_model
from sparsebalance_megatron.cost.model import CostModel
from sparsebalance_megatron.cost.parts import Direction, Part, SegmentCost
from sparsebalance_megatron.cost.table import CostTable, CostTableError, ExchangeRow

EXCHANGES = (
    ExchangeRow(width=2, received_bytes=4_000_000, ms_median=0.1, ms_spread=0.0, repeats=5),
    ExchangeRow(width=4, received_bytes=6_000_000, ms_median=0.15, ms_spread=0.01, repeats=5),
)


def test_save_and_load_round_trip_exactly(tmp_path: Path) -> None:
    """What a table lacks is the default, and a bad one has no text."""
    path = tmp_path / "table.json"
    table = replace(
        planted_table(noise=0.1),
        exchanges=EXCHANGES,
        segments=SegmentCost(slowness=1.2, operation_ms=(0.1, 0.4)),
    )
    path.write_text(table.text())
    loaded = CostTable.load(path)
    assert loaded == table and loaded.path == str(path)
    assert fit_cost_model(loaded).segments == table.segments
    rows = (msgspec.structs.replace(table.rows[0], ms_median=float("nan")), *table.rows[1:])
    with pytest.raises(CostTableError, match=r"rows\[0\].ms_median nan"):
        replace(table, rows=rows).text()
    document = json.loads(path.read_text())
    path.write_text(json.dumps(document | {"segments": {"slowness": 0.5}}))
    with pytest.raises(CostTableError, match=r"slowness 0.5"):
        CostTable.load(path)
    del document["exchanges"], document["segments"]
    path.write_text(json.dumps(document))
    loaded = CostTable.load(path)
    assert loaded.exchanges == () and fit_cost_model(loaded).segments == SegmentCost()


def test_only_the_router_may_lack_backward_rows() -> None:
    table = planted_table()
    table.validate()
    rows = tuple(
        row for row in table.rows if (row.part, row.direction) != (Part.LINEAR, Direction.BACKWARD)
    )
    with pytest.raises(CostTableError, match="no row for linear backward"):
        replace(table, rows=rows).validate()


def test_every_differing_field_is_named_with_both_values() -> None:
    planted_table().check_matches(vars(IDENTITY))
    planted_table().check_matches({"block_size": 128})
    shape = replace(IDENTITY.shape, hidden_size=2048)
    run = replace(IDENTITY, device="NVIDIA H200", shape=shape)
    with pytest.raises(CostTableError) as caught:
        planted_table().check_matches({"device": run.device, **run.shape.flat()})
    for difference in (
        "device is cpu in the table, NVIDIA H200 in this run",
        "shape.hidden_size is 256 in the table, 2048 in this run",
    ):
        assert difference in str(caught.value)
    assert "selection" not in str(caught.value)


DELETED = object()
BAD_NUMBERS: tuple[Any, ...] = (
    *(0, -1, 1.5, "1", None, True, [], {}, float("nan"), float("inf"), 10**400, 2**60, DELETED),
)
BAD_TIMES: tuple[Any, ...] = (
    *(0, -1.0, "1", None, True, [], float("nan"), float("-inf"), 10**400, 1e308, 1e-300, DELETED),
)
BAD_TEXTS: tuple[Any, ...] = (None, 5, True, [], {}, DELETED)

DAMAGE: dict[tuple[Any, ...], tuple[Any, ...]] = {
    ("block_size",): (*BAD_NUMBERS, 3),
    ("shape", "num_query_groups"): (3, DELETED),
    ("shape", "hidden_size"): BAD_NUMBERS,
    ("shape", "gated_linear_unit"): ("yes", 1, None, DELETED),
    ("shape",): ([], None, 5, {}, DELETED),
    ("device",): BAD_TEXTS,
    ("selection",): (*BAD_TEXTS, "best"),
    ("threads",): ("1", None, DELETED),
    ("format_version",): (0, 2, "1", None, True, [1], DELETED),
    ("rows",): (None, {}, 5, [], [None], [[]], ["row"], DELETED),
    ("rows", 0, "kind"): (*BAD_TEXTS, "mlp"),
    ("rows", 0, "direction"): (*BAD_TEXTS, "sideways"),
    ("rows", 0, "lengths_tokens"): (*BAD_TEXTS, [0], [-1], [1.5], ["1"], [None], [2**60]),
    ("rows", 0, "budget_blocks"): (0, -1, 1.5, "4", [], DELETED),
    ("rows", 0, "ms_median"): BAD_TIMES,
    ("rows", 0, "ms_spread"): (-1.0, "0", None, float("nan"), DELETED),
    ("rows", 0, "repeats"): (0, -1, 2.5, "5", None, DELETED),
    ("exchanges", 0, "width"): (1, "2", DELETED),
    ("exchanges", 0, "received_bytes"): (0, -1, DELETED),
    ("exchanges", 0, "ms_median"): BAD_TIMES,
}


def load_and_fit(path: Path) -> CostModel:
    return fit_cost_model(CostTable.load(path))


def test_a_later_release_may_write_more_keys(tmp_path: Path) -> None:
    document = json.loads(planted_table().text())
    (tmp_path / "table.json").write_text(json.dumps(document | {"comment": "more"}))
    with warnings.catch_warnings(), bounded():
        warnings.simplefilter("error")
        load_and_fit(tmp_path / "table.json")


CASES = [(path, value) for path, values in DAMAGE.items() for value in values]


@pytest.mark.parametrize(
    ("keys", "value"),
    CASES,
    ids=[
        f"{'.'.join(map(str, keys))} {'deleted' if value is DELETED else str(value)[:20]}"
        for keys, value in CASES
    ],
)
def test_damage(keys: tuple[Any, ...], value: Any, tmp_path: Path) -> None:
    table = json.loads(replace(planted_table(), exchanges=EXCHANGES).text())
    holder: Any = table
    for key in keys[:-1]:
        holder = holder[key]
    if value is DELETED:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    unreadable = isinstance(value, float) and not math.isfinite(value)
    named = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).lstrip(".")
    named = keys[-1] if value is DELETED else "not valid JSON" if unreadable else named
    names = f"cost table {path}", named, "measure again"
    check_refused(lambda: load_and_fit(path), CostTableError, *names)
