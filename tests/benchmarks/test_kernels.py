# SPDX-License-Identifier: Apache-2.0
"""The kernel benchmark: what it counts, and that all of it runs, here in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

import kernels
from harness import REPOSITORY, python_environment
from kernel_contenders import Case, Shape, cases, causal_pairs, selected_pairs, selection_of
from kernel_resources import stages_of
from older_releases import needs_interpreter

from sparsebalance_megatron.config import Granularity

CPU = torch.device("cpu")
TINY = ["--device", "cpu", "--block-sizes", "32", "--rounds", "1", "--query-heads", "4"]
TINY += ["--kv-heads", "2", "--head-dim", "16", "--selections", "previous-block"]


def _run(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """In this process, where kernels are compiled for a GPU that is not there."""
    results = tmp_path / "results.json"
    assert kernels.main(["--json", os.fspath(results), *TINY, *arguments]) == 0
    read: dict[str, Any] = json.loads(results.read_text())
    return read


def _run_interpreted(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    """In a process of its own: Triton decides when a kernel is defined what it will be."""
    results = tmp_path / "results.json"
    command = [sys.executable, "benchmarks/kernels.py", "--json", os.fspath(results), *TINY]
    done = subprocess.run(
        [*command, *arguments],
        cwd=REPOSITORY,
        env=python_environment() | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    read: dict[str, Any] = json.loads(results.read_text())
    return read


@pytest.mark.parametrize(
    ("skewed", "granularity"),
    [
        (False, "previous-block"),
        (True, "previous-block"),
        (True, "token-kv-head"),
        (False, "vertical-slash"),
    ],
)
def test_counted_pairs_are_those_that_are_read(skewed: bool, granularity: Granularity) -> None:
    case = Case(tokens=300, block_size=32, budget=4, skewed=skewed, selection=granularity)
    shape = Shape(query_heads=6, kv_heads=2, head_dim=16)
    selection = selection_of(case, shape, CPU)
    layout = selection.query_layout
    read = total = 0
    for query in range(case.tokens):
        block = int(layout.block_T[query])
        start = layout.cu_seqlens[int(layout.document_N[block])]
        total += (query - start + 1) * 6
        row = query if selection.by_token else block
        for kv_head in range(2):
            count = int(selection.counts_QC[row, kv_head])
            assert count <= case.budgets[int(layout.document_N[block])]
            listed = set(selection.indices_QCK[row, kv_head, :count].tolist())
            keys = range(start, query + 1)
            read += 3 * sum(int(layout.block_T[key]) in listed for key in keys)
            if selection.columns is not None:
                read += 3 * int(selection.columns.counts_NG[row, kv_head])
    assert selected_pairs(selection, shape) == read
    assert causal_pairs(case, shape) == total


def test_cases_reach_from_few_blocks_to_the_default_budget() -> None:
    found = list(cases([65536], [128, 256]))
    assert Case(tokens=65536, block_size=256, budget=32, skewed=False) in found
    assert Case(tokens=65536, block_size=128, budget=64, skewed=True) in found
    assert len(set(found)) == len(found)


@needs_interpreter
def test_every_case_measures_every_contender(tmp_path: Path) -> None:
    results = _run_interpreted(tmp_path, "--tokens", "64")
    assert [case.name for case in cases([64], [32])] == list(results["cases"])
    for case in results["cases"].values():
        assert 0 < case["density"] <= 1
        for name in ("triton", "blocks", "reference", "dense math"):
            for part in ("forward", "backward", "both"):
                measured = case[name][part]
                assert 0 < measured["min_ms"] <= measured["median_ms"] <= measured["max_ms"]
                assert measured["tflops"] > 0
        assert case["router"]["median_ms"] > 0
        assert case["index"]["median_ms"] > 0


@needs_interpreter
def test_selections_by_token_are_measured(tmp_path: Path) -> None:
    results = _run_interpreted(tmp_path, "--tokens", "32", "--selections", "token-kv-head")
    assert len(results["cases"]) == 2
    for case in results["cases"].values():
        for name in ("triton", "tokens", "reference"):
            assert case[name]["both"]["median_ms"] > 0, case
        assert case["index"]["median_ms"] > 0


def test_versions_by_token_have_the_stages_that_name_them() -> None:
    """With the benchmark's own head dim and first block size."""
    for name, tiles in kernels.PROMISING_TOKEN_TILES.items():
        for tile in tiles:
            assert stages_of(f"token_{name}", tile, 256, Shape.head_dim) == tile.stages, tile


@needs_interpreter
@pytest.mark.parametrize(
    ("selection", "tiles", "others"),
    [
        ("previous-block", kernels.PROMISING_TILES, 0),
        ("token-kv-head", kernels.PROMISING_TOKEN_TILES, len(kernels.PARTIAL_BYTES)),
    ],
    ids=["query blocks", "tokens"],
)
def test_tuning_times_every_promising_tile(
    selection: str, tiles: dict[str, list[Any]], others: int, tmp_path: Path
) -> None:
    small = ("--tokens", "16", "--query-heads", "2", "--kv-heads", "1", "--selections", selection)
    results = _run_interpreted(tmp_path, *small, "--tune")
    promising = sum(map(len, tiles.values()))
    for case in results["cases"].values():
        assert len(case) == 1 + promising + others
        assert all("both" in tile for tile in case.values()), case


def test_a_contender_that_fails_is_a_result(tmp_path: Path) -> None:
    results = _run(tmp_path, "--tokens", "64")
    for case in results["cases"].values():
        assert "needs CUDA" in case["triton"]["error"]
        assert case["blocks"]["both"]["median_ms"] > 0


def test_what_no_time_is_left_for_is_listed(tmp_path: Path) -> None:
    results = _run(tmp_path, "--tokens", "64", "--minutes", "0")
    assert results["cases"] == {}
    assert results["left_out"] == [case.name for case in cases([64], [32])]


def test_a_run_that_was_cut_off_goes_on(tmp_path: Path) -> None:
    names = [case.name for case in cases([32], [32])]
    first = _run(tmp_path, "--tokens", "32")
    path = tmp_path / "results.json"
    cut_off = first | {"cases": {names[0]: {"density": -1.0}}}
    path.write_text(json.dumps(cut_off))
    again = _run(tmp_path, "--tokens", "32", "--resume")
    assert list(again["cases"]) == names
    assert again["cases"][names[0]] == {"density": -1.0}
    path.write_text(json.dumps(cut_off | {"rounds": 99}))
    anew = _run(tmp_path, "--tokens", "32", "--resume")
    assert anew["cases"][names[0]]["density"] > 0


def test_without_a_gpu_it_measures_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main([]) == 2
    assert "no CUDA device is visible" in capsys.readouterr().err
