# SPDX-License-Identifier: Apache-2.0
"""What decides on a GPU whether kernels are right and worth it, run on a CPU."""

import json
from pathlib import Path

import pytest

pytest.importorskip("triton")
from attention_rates import main, verdicts


def test_every_result_is_printed_at_once_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rates.json"
    small = ("--device", "cpu", "--tokens", "128", "--rounds", "1")
    assert main([*small, "--json", str(path)]) == 0
    *said, _ = map(json.loads, capsys.readouterr().out.splitlines())
    found = json.loads(path.read_text())["cases"]
    assert said == found
    right = [each for each in found if each.get("case") == "right" and each["kernel"] == "torch"]
    assert right and all(max(each["errors"]) < 1e-5 for each in right)
    assert not any(each["runs_with_nan"] or any(each["nan_reaches_others"]) for each in right)
    served = [each for each in found if "error" not in each and "left out" not in each]
    assert {each["case"] for each in served} == {"right", "dense", "lists", "varied"}


def test_verdicts_compare_what_was_measured_of_both() -> None:
    def case(kind: str, kernel: str, size: str, ms: float) -> dict[str, object]:
        return {"case": kind, "kernel": kernel, size: 16, "both": {"median_ms": ms}}

    found = [case("dense", "torch", "documents", 10.0), case("dense", "fa4", "documents", 7.0)]
    found += [case("lists", "triton", "budget", 10.0), case("lists", "fa4", "budget", 9.0)]
    assert verdicts(found) == {
        "dense 16": {"fa4 over torch": 0.7, "worth it": True},
        "lists 16": {"fa4 over triton": 0.9, "worth it": False},
    }
    assert verdicts([*found[:1], {"error": "no memory"}]) == {}
