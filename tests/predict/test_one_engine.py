# SPDX-License-Identifier: Apache-2.0
"""Commands predict alike: equal settings give equal numbers, to the digit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from predict.predict_cases import write_job_lengths

from sparsebalance_megatron import cli

JOBS = 20


def found_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict:
    assert cli.main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def without_times(outcome: dict) -> dict:
    """An outcome without how long planning took, and without what it is compared with."""
    left_out = ("plan_ms", "speedup", "speedup_least", "choice", "speedup_over_dense")
    more = ("covers_less", "at_most_gib")
    return {name: value for name, value in outcome.items() if name not in (*left_out, *more)}


@pytest.mark.parametrize("number", range(JOBS))
def test_plan_and_advise_predict_the_same(
    number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generator = np.random.default_rng(number)

    def drawn(*values: object) -> str:
        return str(generator.choice(values))

    tp, pp, cp, ep = drawn(1, 2), drawn(1, 2, 4), drawn(1, 2), drawn(1, 2)
    groups, positions, samples = int(drawn(1, 2)), int(drawn(2, 4)), int(drawn(1, 3))
    ranks = groups * int(cp)
    batch = groups * positions * samples
    gpus = ranks * int(tp) * int(pp)
    model = "qwen3-30b-a3b" if int(ep) > 1 and ranks % 2 == 0 else "qwen2.5-0.5b"
    ep = ep if model.startswith("qwen3") else "1"
    path = tmp_path / "lengths.txt"
    lengths = np.clip(2000 * np.exp(generator.standard_normal(3 * batch)), 16, 16384).astype(int)
    path.write_text("\n".join(map(str, lengths)))
    both = [
        *("--lengths", str(path), "--model", model, "--tp", tp, "--pp", pp, "--ep", ep),
        *("--cp", cp, "--global-batch", str(batch), "--steps", drawn(1, 2)),
        *("--recompute", drawn("none", "attention", "full")),
        *("--counted-device", drawn("a100", "h100", "b200"), "--gpu-memory", "1000"),
        *("--sparse-efficiency", drawn(0.2, 0.4), "--coverage-threshold", drawn(0.05, 0.1)),
        *(["--seed", "7"] if number % 2 else []),
    ]
    block, budget = drawn(128, 256), drawn(4, 8)
    apart = positions // int(cp)
    planned = found_by(
        [
            *("plan", *both, "--dp", str(ranks), "--micro-batches", str(apart)),
            *("--block-size", block, "--base-budget", budget),
        ],
        capsys,
    )
    advised = found_by(
        [
            *("advise", *both, "--gpus", str(gpus), "--micro-batches", str(positions)),
            *("--block-sizes", block, "--base-budgets", budget),
        ],
        capsys,
    )
    (choice,) = advised["choices"]
    row = "ours" if cp == "1" else "ours-dynamic-cp"
    assert without_times(choice) == without_times(planned["variants"][row])
    dense = planned["variants"]["dense, balanced"]["makespan_ms"]
    assert choice["speedup_over_dense"] == dense / choice["makespan_ms"]
    assert advised["break_even_slowness"] == planned["break_even_slowness"]
    assert advised["header"] == planned["header"]


def test_a_setup_is_the_plan_of_its_layout(capsys: pytest.CaptureFixture[str]) -> None:
    steps = ("--steps", "2", "--seed", "3")
    simulated = found_by(["simulate", "--setup", "paper-main", *steps], capsys)["data"]["longalign"]
    layout = ("--dp", "4", "--pp", "4", "--tp", "2", "--micro-batches", "4")
    given = ("--lengths-from", "longalign", "--model", "qwen2.5-3b")
    planned = found_by(["plan", *given, *layout, *steps], capsys)
    for name, outcome in planned["variants"].items():
        assert without_times(outcome) == without_times(simulated["variants"][name])
        assert outcome["speedup"] == simulated["variants"][name]["speedup"]


def test_a_job_of_64_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One step time, a break-even, and memory that does not depend on the steps looked at."""
    lengths = ("--lengths", str(write_job_lengths(tmp_path / "lengths.txt")))
    job = (*lengths, "--model", "qwen2.5-7b", "--tp", "2", "--pp", "4", "--global-batch", "64")
    layout = ("--dp", "8", "--micro-batches", "8")
    default = found_by(["advise", *job, "--gpus", "64"], capsys)
    planned = found_by(["plan", *job, *layout], capsys)
    (choice,) = default["choices"]
    ours = planned["variants"]["ours"]
    assert choice["makespan_ms"] == ours["makespan_ms"]
    assert len(choice["step_ms"]) == 20
    break_even = planned["break_even_efficiency"]
    assert 0.01 < break_even < 0.3
    assert any(f"must reach {break_even:.0%} of peak" in line for line in default["advice"])
    few = found_by(["advise", *job, "--gpus", "64", "--steps", "2"], capsys)["choices"][0]
    assert few["stages_at_most"] == choice["stages_at_most"] == ours["stages_at_most"]
    assert few["stages"] != choice["stages"]
    for held, most in zip(choice["stages"], choice["stages_at_most"], strict=True):
        assert held["activations_bytes"] <= most["activations_bytes"]
    # Equal rates: dense attention at the rate of sparse attention flatters the comparison.
    alike = ("--dense-efficiency", "0.13", "--steps", "2")
    flattered = found_by(["advise", *job, "--gpus", "64", *alike], capsys)
    assert flattered["choices"][0]["speedup_over_dense"] > few["speedup_over_dense"]
