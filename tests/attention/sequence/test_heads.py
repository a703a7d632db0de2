# SPDX-License-Identifier: Apache-2.0
"""Heads that travel, on real process groups: results of one rank, bit for bit, and traffic."""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from harness import PROGRAMS, run_training

REPEATED_ROUNDING = {"float64": 1e-15, "float32": 1e-6, "bfloat16": 8e-3}
"""Sums of parts of a KV head's gradient, in two roundings of each part."""


@functools.cache
def _all_reports(members: int) -> dict[str, list[dict[str, Any]]]:
    """What each member reports of documents that are dense, and of lists."""
    with tempfile.TemporaryDirectory() as directory:
        program = (str(PROGRAMS / "heads_rank.py"), directory)
        run_training(members, (), program=program).require_success()
        return {
            of: [
                json.loads((Path(directory) / f"{of}{rank}.json").read_text())
                for rank in range(members)
            ]
            for of in ("rank", "lists")
        }


def _reports(members: int) -> list[dict[str, Any]]:
    return _all_reports(members)["rank"]


@pytest.mark.distributed
@pytest.mark.parametrize("members", [2, 4])
def test_results_are_those_of_one_rank(members: int) -> None:
    """Documents shorter than the group, unequal members, one that holds nothing, values narrower
    than keys; a document's NaN reaches no other."""
    for report in _reports(members):
        for case, found in report.items():
            repeats_kv_heads = members > {"one-kv-head": 1, "grouped": 4}.get(
                case.rsplit("-", 1)[0], 8 if case.startswith(("short", "latent")) else 2
            )
            rounding = REPEATED_ROUNDING[case.rsplit("-", 1)[1]]
            for name in ("out", "dq", "dk", "dv"):
                assert found[name]["broken"], (case, name)
                if name in ("out", "dq") or not repeats_kv_heads:
                    assert found[name]["equal"], (case, name, found[name])
                assert found[name]["error"] <= rounding, (case, name, found[name])


@pytest.mark.distributed
@pytest.mark.parametrize("members", [2, 4])
def test_two_exchanges_forward_and_two_backward(members: int) -> None:
    """Every member receives (H (D + F) + max(G, W) (D + F)) / W values of each token of others."""
    for report in _reports(members):
        found = report["grouped-float32"]
        assert (found["forward"]["calls"], found["both"]["calls"]) == (2, 4)
    total = sum(report["grouped-float32"]["forward"]["elements"] for report in _reports(members))
    tokens, heads = 100 + 37 + 512 + 8 + 255, 8 * (16 + 16) + max(4, members) * (16 + 16)
    assert total == tokens * (members - 1) * heads // members


@pytest.mark.distributed
@pytest.mark.parametrize("members", [2, 4])
def test_lists_are_selected_by_each_member_for_its_heads(members: int) -> None:
    """Layers with sinks give one rank's outputs, gradients and coverage, beside dense documents and
    a broken one; the router exchanges nothing."""
    for report in _all_reports(members)["lists"]:
        for selection, found in report.items():
            assert found.pop("calls") == 4, selection
            for name, error in found.items():
                if name.endswith("broken"):
                    assert error, (selection, name)
                else:
                    rounding = 1e-6 if name == "coverage_SK" else 1e-12
                    assert error <= rounding, (selection, name, error)
