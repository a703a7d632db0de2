# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance env``: versions against ranges, devices, attention that is really tried."""

from __future__ import annotations

import json
import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
import torch

from sparsebalance_megatron import __version__, cli, supported
from sparsebalance_megatron.attention import self_check
from sparsebalance_megatron.cli import env
from sparsebalance_megatron.config import AttentionImplementation, Router, SparseBalanceConfig

EVERYWHERE = {"implementation blocks", "implementation tokens", "implementation reference"}


@pytest.mark.parametrize(
    ("known", "inside"),
    [("0.19", True), ("0.18.9", False), ("0.21.0rc1", False), ("0.20.0rc1+abc", True)],
)
def test_pre_releases_count_as_their_release(known: str, inside: bool) -> None:
    assert supported.is_supported("megatron-core", known) is inside
    assert supported.is_supported("torch", "2.8.0a0+5228986c39.nv25.6")


def test_versions_and_devices(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["installed"]) == set(env.PACKAGES)
    assert found["installed"]["sparsebalance-megatron"] == __version__
    assert found["torch"]["version"] == version("torch")
    assert found["megatron"]["verdict"].startswith("supported (range")
    assert found["megatron"]["problem"] is None
    assert Path(found["megatron"]["path"], "core").is_dir()
    assert "attention" not in found
    devices = {"cpu", "cuda"}
    if torch.cuda.is_available():
        devices = {"cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))}
    assert found["device"].keys() == devices
    assert cli.main(["env"]) == 0
    assert "\ntorch verdict                   supported (range" in capsys.readouterr().out


@pytest.mark.nightly
def test_attention_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--check", "--json"]) == 0
    tried = json.loads(capsys.readouterr().out)["attention"]
    names = {f"implementation {name}" for name in get_args(AttentionImplementation)}
    names |= {f"router {name}" for name in get_args(Router)}
    dims = {name for name in tried if name.startswith("head dims")}
    assert tried.keys() - dims == names - {"implementation auto", "router auto"}
    usable = {name for name, each in tried.items() if each["usable"]}
    assert usable >= EVERYWHERE | dims | {"router torch"}
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        assert usable == EVERYWHERE | dims | {"router torch"}
        assert 'use "tokens" or "auto"' in tried["implementation triton"]["says"]


def test_an_implementation_that_breaks_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(config: SparseBalanceConfig, **_: object) -> None:
        raise RuntimeError(f"{config.attention}: no compiler\nlong trace")

    monkeypatch.setattr(self_check, "check_attention", broken)
    assert cli.main(["env", "--check"]) == 1
    (line,) = (each for each in capsys.readouterr().out.splitlines() if "tation blocks" in each)
    assert line.endswith("does not run: blocks: no compiler")


@pytest.mark.parametrize(("broken", "status"), [("triton", 0), ("reference", 1)])
def test_the_status_tells_of_what_a_cpu_should_run(
    broken: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(config: SparseBalanceConfig, **_: object) -> self_check.Verdict:
        off = broken in (config.attention, config.router)
        return self_check.Verdict(kernel="some", errors={"out": 2.0 if off else 0.5})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(self_check, "check_attention", check)
    assert cli.main(["env", "--check", "--json"]) == status


def test_a_checkout_on_the_path_hides_an_installed_megatron(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "package_info.py").write_text("__version__ = '0.21.0rc0+abc'\n")
    for name in [name for name in sys.modules if name.partition(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "megatron" / "__init__.py").touch()
    found = env.environment()["megatron"]
    assert found["version"] == "0.21.0rc0" and found["verdict"].startswith("NOT supported")
    assert found["path"] == str(tmp_path / "megatron")
    assert found["problem"].startswith("version 0.21.0rc0 is outside")


def test_without_torch_or_megatron_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = env.environment()
    assert found["device"]["cuda"].startswith("none: torch cannot be imported")
    assert found["megatron"]["problem"].startswith("no megatron.core is found; install megatron")
