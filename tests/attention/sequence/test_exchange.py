# SPDX-License-Identifier: Apache-2.0
"""Every exchange on real process groups: results of one rank, traffic as counted."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, run_training
from oracles.exchange_bytes import exchange_bytes

pytestmark = pytest.mark.distributed

EXCHANGES = ("all-gather", "ring", "hierarchical-ring")
INNER_MEMBERS = {2: 1, 3: 3, 4: 2, 6: 3}
"""Members of an inner group of the hierarchical ring, by the number of members."""
every_size = pytest.mark.parametrize(
    "members", [4, *(pytest.param(each, marks=pytest.mark.nightly) for each in (2, 3, 6))]
)
KV_HEADS, HEAD_DIM = 2, (8 + 12) // 2


@functools.cache
def _reports(members: int) -> list[dict[str, Any]]:
    """What each member reports."""
    with tempfile.TemporaryDirectory() as directory:
        program = (str(PROGRAMS / "exchange_rank.py"), directory)
        run_training(members, (), program=program).require_success()
        return [
            json.loads((Path(directory) / f"rank{rank}.json").read_text())
            for rank in range(members)
        ]


def _calls(exchange: str, members: int) -> list[dict[str, int]]:
    """Collectives of a forward and a backward pass."""
    if exchange == "all-gather":
        gathers = {"all_gather_into_tensor": KV_HEADS}
        return [gathers, gathers | {"reduce_scatter_tensor": KV_HEADS}]
    if exchange == "ring":
        return [{"batch_isend_irecv": members - 1}, {"batch_isend_irecv": 2 * members - 1}]
    inner = INNER_MEMBERS[members]
    outer = members // inner
    sums = (outer * inner if inner > 1 else 0) + (outer if outer > 1 else 0)
    return [{"batch_isend_irecv": n} for n in (members - 1, members - 1 + sums)]


@every_size
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_results_are_those_of_one_rank(exchange: str, members: int) -> None:
    """GQA, ragged documents, dealt and random owners, all kinds of lists; memory that is not
    written is NaN, and in one case a document is."""
    for report in _reports(members):
        for case, found in report["exchanges"][exchange].items():
            for name, error in found["errors"].items():
                assert error <= 1e-12, (case, name)
            assert found["repeats"], f"{case}: other bits the second time"


@every_size
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_traffic_is_what_it_says(exchange: str, members: int) -> None:
    """Collectives per pass, and the bytes that the cost model counts with."""
    for member, report in enumerate(_reports(members)):
        for case, found in report["exchanges"][exchange].items():
            assert found["calls"] == _calls(exchange, members), case
            inner = INNER_MEMBERS[members] if exchange == "hierarchical-ring" else None
            expected = exchange_bytes(
                *(exchange, member, found["tokens"], inner), kv_heads=KV_HEADS, head_dim=HEAD_DIM
            )
            assert found["bytes"] == list(expected), case


@every_size
@pytest.mark.parametrize("exchange", EXCHANGES)
def test_shared_segments_are_the_whole(exchange: str, members: int) -> None:
    """Lists bit by bit, coverage of all tokens, outputs and gradients to float64's rounding."""
    for report in _reports(members):
        for selector, found in report["segments"][exchange].items():
            assert found["lists"], selector
            assert found["segments"] > 1
            assert found["coverage"] <= 1e-6, selector  # float32
            assert found["kept"] == [0, 0, 0]
            for name, error in found["errors"].items():
                assert error <= 1e-12, (selector, name)


@every_size
def test_summaries_are_those_of_the_sequence(members: int) -> None:
    found = [report["summaries"] for report in _reports(members)]
    for one in found:
        assert one["equal"]
        assert one["calls"] == {"all_gather_into_tensor": 1, "all_reduce": 1}
        assert one["error"] <= 1e-12
    assert len({one["digest"] for one in found}) == 1, "sums differ between members"
