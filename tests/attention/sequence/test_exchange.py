# SPDX-License-Identifier: Apache-2.0
"""The exchange on real process groups: results of one rank, traffic as counted."""

import functools

import pytest
from attention.sequence.slices import reports_of

pytestmark = pytest.mark.distributed

every_size = pytest.mark.parametrize(
    "members", [4, *(pytest.param(each, marks=pytest.mark.nightly) for each in (2, 3, 6))]
)
KV_HEADS, HEAD_DIM = 2, (8 + 12) // 2


_reports = functools.partial(reports_of, "exchange_rank.py", "rank")


@every_size
def test_results_are_those_of_one_rank(members: int) -> None:
    """GQA, ragged documents, dealt and random owners, all kinds of lists, dense documents alone and
    before others; memory that is not written is NaN, and in some cases a document is."""
    for report in _reports(members):
        for case, found in report["cases"].items():
            for name, error in found["errors"].items():
                assert error <= 1e-12, (case, name)
            assert found["repeats"], f"{case}: other bits the second time"


@every_size
def test_traffic_is_what_it_says(members: int) -> None:
    """Collectives per pass, and the bytes that the cost model counts with."""
    for report in _reports(members):
        for case, found in report["cases"].items():
            gathers = {"all_gather_into_tensor": KV_HEADS}
            assert found["calls"] == [gathers, gathers | {"reduce_scatter_tensor": KV_HEADS}], case
            # Keys and values of float64, of the others' tokens, padded to the longest.
            padded = (members - 1) * max(found["tokens"]) * 2 * KV_HEADS * HEAD_DIM * 8
            assert found["bytes"] == [padded, 2 * padded], case


@every_size
def test_shared_segments_are_the_whole(members: int) -> None:
    """Lists bit by bit, coverage of all tokens, outputs and gradients to float64's rounding."""
    for report in _reports(members):
        for selector, found in report["segments"].items():
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
