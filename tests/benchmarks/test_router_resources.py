# SPDX-License-Identifier: Apache-2.0
"""The router's ranking kernel compiles for Hopper on any machine, and nothing of it spills."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("kernels are interpreted", allow_module_level=True)

import router_resources  # noqa: E402
from older_releases import needs_sorts_in_a_warp  # noqa: E402


@pytest.fixture(autouse=True)
def fresh_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(triton.knobs.cache, "dir", os.fspath(tmp_path))


@pytest.mark.parametrize(
    ("blocks", "places", "observe"),
    [
        pytest.param(64, 16, False, marks=needs_sorts_in_a_warp),
        (256, 64, True),
        (1024, 64, False),
    ],
)
def test_keys_stay_in_registers(blocks: int, places: int, observe: bool) -> None:
    found = router_resources.resources(blocks, places, observe=observe)
    assert found.spilled_bytes == 0
    assert found.taken == (blocks if observe else places)
    # Rows of up to 256 blocks lie within a warp: none waits for another.
    assert (found.barriers == 0) == (blocks <= 256)


def test_the_command_writes_what_it_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "results.json"
    arguments = ["--json", os.fspath(path), "--blocks", "16", "--places", "16"]
    assert router_resources.main(arguments) == 0
    rows = json.loads(path.read_text())["ranking"]
    printed = capsys.readouterr().out.splitlines()
    assert [row["observe"] for row in rows] == [True, False]
    for row, line in zip(rows, printed, strict=True):
        assert f"{row['registers']} registers, {row['spilled_bytes']} bytes spilled" in line
