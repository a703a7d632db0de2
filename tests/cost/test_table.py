# SPDX-License-Identifier: Apache-2.0
"""Tables survive the disk unchanged; damaged or foreign ones are refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    bad = replace(table, rows=(replace(table.rows[0], ms_median=float("nan")), *table.rows[1:]))
    with pytest.raises(CostTableError, match=r"row 0: ms_median nan"):
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
    (_drop("device"), r"device is missing"),
    (_drop("rows"), r"rows is missing"),
    (_drop("shape"), r"shape is missing"),
    (lambda document: document["shape"].pop("head_dim"), r"shape: head_dim is missing"),
    (lambda document: document["rows"][3].pop("ms_median"), r"row 3: ms_median is missing"),
    (lambda document: document["rows"][3].pop("budget_blocks"), r"budget_blocks is missing"),
    (_set("format_version", 99), r"format_version is 99, this release reads 1"),
    (_set("block_size", 0), r"block_size is 0"),
    (_set("block_size", True), r"block_size is True, expected int"),
    (_set("block_size", "128"), r"block_size is '128', expected int"),
    (_set("rows", []), r"no row for attention forward"),
    (_set("rows", {}), r"rows is \{\}, expected list"),
    (_set("rows", [7]), r"row 0: expected an object, found int"),
    (_row("ms_median", float("nan")), r"not valid JSON \(.*\)"),
    (_row("ms_median", float("inf")), r"not valid JSON \(.*\)"),
    (_row("ms_median", 1e308), r"row 3: ms_median 1e\+308 must lie in 1e-07 to 1e\+07"),
    (_row("ms_median", 10**400), r"row 3: ms_median is an integer of more than"),
    (_row("lengths_tokens", [2**41]), r"row 3, lengths_tokens: 0 is an integer of more than"),
    (_row("ms_median", -1.0), r"row 3: ms_median -1\.0"),
    (_row("ms_median", 0), r"row 3: ms_median 0\.0"),
    (_row("ms_median", None), r"row 3: ms_median is None, expected float"),
    (_row("ms_spread", -0.5), r"row 3: ms_spread -0\.5"),
    (_row("repeats", 0), r"row 3: repeats 0"),
    (_row("kind", "gpu"), r"row 3: kind is 'gpu', expected one of attention, router"),
    (_row("direction", "up"), r"row 3: direction is 'up', expected one of forward, backward"),
    (_row("lengths_tokens", []), r"row 3: lengths_tokens \[\] must be at least 1"),
    (_row("lengths_tokens", [5, 0]), r"row 3: lengths_tokens \[5, 0\]"),
    (_row("lengths_tokens", [5, 1.5]), r"row 3, lengths_tokens: 1 is 1\.5, expected int"),
    (_row("budget_blocks", 0), r"row 3: budget_blocks 0"),
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


def test_an_equal_identity_matches(measure: Measure, identity: RunIdentity) -> None:
    measure().check_matches(identity)


def test_every_differing_field_is_named_with_both_values(
    measure: Measure, identity: RunIdentity
) -> None:
    run = replace(
        identity,
        device="NVIDIA H200",
        dtype="bfloat16",
        block_size=256,
        shape=replace(identity.shape, hidden_size=2048),
    )
    with pytest.raises(CostTableError) as caught:
        measure().check_matches(run)
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
        ({"width": 1}, "exchange 0: 4000000 bytes received by 1 ranks"),
        ({"received_bytes": 0}, "exchange 0: 0 bytes"),
        ({"ms_median": 0.0}, "exchange 0: ms_median 0.0"),
    ],
)
def test_exchanges_that_no_measurement_gives(
    measure: Measure, changes: dict[str, Any], words: str
) -> None:
    bad = replace(EXCHANGES[0], **changes)
    with pytest.raises(CostTableError, match=words):
        replace(measure(), exchanges=(bad,)).validate()
