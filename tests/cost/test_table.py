# SPDX-License-Identifier: Apache-2.0
"""Tables survive the disk unchanged; damaged or foreign ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from sparsebalance_megatron.cost.parts import Direction, Part
from sparsebalance_megatron.cost.table import CostTable, CostTableError, ExchangeRow, RunIdentity

Measure = Callable[..., CostTable]


def test_save_and_load_round_trip_exactly(tmp_path: Path, measure: Measure) -> None:
    table = measure(noise=0.1)
    table.save(tmp_path / "table.json")
    loaded = CostTable.load(tmp_path / "table.json")
    assert loaded == table
    assert loaded.path == str(tmp_path / "table.json")


def test_save_replaces_the_file_and_leaves_nothing_else(tmp_path: Path, measure: Measure) -> None:
    path = tmp_path / "table.json"
    path.write_text("old")
    measure().save(path)
    CostTable.load(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["table.json"]


def test_an_invalid_table_is_not_written(tmp_path: Path, measure: Measure) -> None:
    table = measure()
    bad = replace(
        table,
        rows=(msgspec.structs.replace(table.rows[0], ms_median=float("nan")), *table.rows[1:]),
    )
    with pytest.raises(CostTableError, match=r"rows\[0\].ms_median nan"):
        bad.save(tmp_path / "table.json")
    assert not list(tmp_path.iterdir())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(CostTableError, match=r"nowhere\.json: cannot be read \(No such file"):
        CostTable.load(tmp_path / "nowhere.json")


@pytest.mark.parametrize("text", ["", "{", '{"format_version": 1', "\x00\x01"])
def test_text_that_is_not_json_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "table.json").write_text(text)
    with pytest.raises(CostTableError, match=r"table\.json: not valid JSON .* measure again"):
        CostTable.load(tmp_path / "table.json")


def test_binary_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(CostTableError, match="not UTF-8 text"):
        CostTable.load(tmp_path / "table.json")


def _drop(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document.pop(key)


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document.__setitem__(key, value)


def _row(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda document: document["rows"][3].__setitem__(key, value)


_DAMAGE = [
    (_drop("device"), r"missing required field device"),
    (_drop("rows"), r"missing required field rows"),
    (_drop("shape"), r"missing required field shape"),
    (lambda document: document["shape"].pop("head_dim"), r"shape: .* required field head_dim"),
    (lambda document: document["rows"][3].pop("ms_median"), r"rows\[3\]: .* field ms_median"),
    (lambda document: document["rows"][3].pop("budget_blocks"), r"rows\[3\]: .* budget_blocks"),
    (_set("format_version", 99), r"format_version 99: "),
    (_set("block_size", 0), r"block_size 0: Expected int >= 1"),
    (_set("block_size", 3), r"block_size 3: must be a power of two"),
    (_set("block_size", True), r"block_size True: Expected int"),
    (_set("block_size", "128"), r"block_size '128': Expected int"),
    (lambda document: document["shape"].update(num_query_groups=3), r"num_query_groups 3: must"),
    (_set("rows", []), r"no row for attention forward"),
    (_set("rows", {}), r"rows: Expected array"),
    (_set("rows", [7]), r"rows\[0\] 7: Expected object"),
    (_row("ms_median", float("nan")), r"not valid JSON \(.*\)"),
    (_row("ms_median", float("inf")), r"not valid JSON \(.*\)"),
    (_row("ms_median", 1e308), r"rows\[3\].ms_median 1e\+308: Expected float <= 1"),
    (_row("ms_median", 10**400), r"not valid JSON|rows\[3\].ms_median 1"),
    (_row("lengths_tokens", [2**41]), r"rows\[3\].lengths_tokens\[0\] 2199023255552: "),
    (_row("ms_median", -1.0), r"rows\[3\].ms_median -1\.0: "),
    (_row("ms_median", 0), r"rows\[3\].ms_median 0: "),
    (_row("ms_median", None), r"rows\[3\].ms_median None: Expected float"),
    (_row("ms_spread", -0.5), r"rows\[3\].ms_spread -0\.5: "),
    (_row("repeats", 0), r"rows\[3\].repeats 0: "),
    (_row("kind", "gpu"), r"rows\[3\].kind 'gpu': "),
    (_row("direction", "up"), r"rows\[3\].direction 'up': "),
    (_row("lengths_tokens", []), r"rows\[3\].lengths_tokens: Expected array of length >= 1"),
    (_row("lengths_tokens", [5, 0]), r"rows\[3\].lengths_tokens\[1\] 0: "),
    (_row("lengths_tokens", [5, 1.5]), r"rows\[3\].lengths_tokens\[1\] 1\.5: Expected int"),
    (_row("budget_blocks", 0), r"rows\[3\].budget_blocks 0: "),
]


@pytest.mark.parametrize(("damage", "message"), _DAMAGE, ids=[message for _, message in _DAMAGE])
def test_damage_is_named_with_place_and_remedy(
    tmp_path: Path, measure: Measure, damage: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = tmp_path / "table.json"
    measure().save(path)
    document = json.loads(path.read_text())
    damage(document)
    path.write_text(json.dumps(document))
    with pytest.raises(CostTableError, match=rf"table\.json.*{message}.*measure again"):
        CostTable.load(path)


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
    run = replace(
        identity,
        device="NVIDIA H200",
        dtype="bfloat16",
        block_size=256,
        shape=replace(identity.shape, hidden_size=2048),
    )
    with pytest.raises(CostTableError) as caught:
        measure().check_matches(run.flat())
    for difference in (
        "device is cpu in the table, NVIDIA H200 in this run",
        "dtype is float32 in the table, bfloat16 in this run",
        "block_size is 128 in the table, 256 in this run",
        "shape.hidden_size is 256 in the table, 2048 in this run",
    ):
        assert difference in str(caught.value)
    assert "selection" not in str(caught.value)


EXCHANGES = (
    ExchangeRow(width=2, received_bytes=4_000_000, ms_median=0.1, ms_spread=0.0, repeats=5),
    ExchangeRow(width=4, received_bytes=6_000_000, ms_median=0.15, ms_spread=0.01, repeats=5),
)


def test_exchanges_are_kept_and_may_be_absent(tmp_path: Path, measure: Measure) -> None:
    path = tmp_path / "table.json"
    table = replace(measure(), exchanges=EXCHANGES)
    table.save(path)
    assert CostTable.load(path) == table
    document = json.loads(path.read_text())
    del document["exchanges"]
    path.write_text(json.dumps(document))
    assert CostTable.load(path).exchanges == ()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"width": 1}, r"exchanges\[0\].width 1: "),
        ({"received_bytes": 0}, r"exchanges\[0\].received_bytes 0: "),
        ({"ms_median": 0.0}, r"exchanges\[0\].ms_median 0.0: "),
    ],
)
def test_exchanges_that_no_measurement_gives(
    measure: Measure, changes: dict[str, Any], words: str
) -> None:
    bad = msgspec.structs.replace(EXCHANGES[0], **changes)
    with pytest.raises(CostTableError, match=words):
        replace(measure(), exchanges=(bad,)).validate()
