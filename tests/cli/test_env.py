# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance env``: versions against ranges, devices, attention that is really tried."""

from __future__ import annotations

import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import get_args

import pytest
import torch

from sparsebalance_megatron import __version__, cli, supported
from sparsebalance_megatron.cli import env as environment
from sparsebalance_megatron.config import AttentionImplementation, Router

EVERYWHERE = {"blocks", "tokens", "reference"}


@pytest.mark.parametrize(
    ("known", "inside"),
    [("0.18", True), ("0.17.9", False), ("0.21.0rc1", False), ("0.20.0rc1+abc", True)],
)
def test_pre_releases_count_as_their_release(known: str, inside: bool) -> None:
    assert supported.is_supported("megatron-core", known) is inside
    assert supported.is_supported("torch", "2.8.0a0+5228986c39.nv25.6")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["python"] == platform.python_version()
    assert found["packages"]["torch"] == version("torch")
    assert set(found["packages"]) == set(environment.PACKAGES)
    assert found["sparsebalance_megatron"] == __version__
    assert found["torch"]["in_range"] and found["torch"]["supported"]
    assert found["megatron"]["in_range"] and found["megatron"]["problem"] is None
    assert Path(found["megatron"]["path"], "core").is_dir()
    devices = found["devices"]
    cuda = [each for each in devices["found"] if each["type"] == "cuda"]
    assert len(cuda) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert (devices["no_cuda_because"] is None) == bool(cuda)


def test_attention_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    text = capsys.readouterr().out
    assert f"megatron {version('megatron-core')}: supported (range" in text
    attention = environment.environment()["attention"]
    assert set(attention["implementations"]) == set(get_args(AttentionImplementation)) - {"auto"}
    usable = {name for name, each in attention["implementations"].items() if each["usable"]}
    assert usable >= EVERYWHERE
    if attention["device"] == "cpu" and "TRITON_INTERPRET" not in os.environ:
        assert usable == EVERYWHERE
        remedy = 'needs CUDA, and q lies on cpu: use "tokens" or "auto"'
        assert f"implementation triton does not run: {remedy}" in text
    assert set(attention["routers"]) == set(get_args(Router)) - {"auto"}
    assert attention["routers"]["torch"]["usable"]
    assert attention["head_dims"].keys() == environment.HEAD_DIMS.keys()
    assert all(each["usable"] for each in attention["head_dims"].values())
    assert "  router torch runs" in text
    if attention["device"] == "cpu" and "TRITON_INTERPRET" not in os.environ:
        assert "  router triton does not run: needs " in text


def test_an_implementation_that_breaks_is_told_with_its_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(implementation: str, *_: object) -> None:
        raise RuntimeError(f"{implementation}: no compiler\nlong trace")

    monkeypatch.setattr(environment, "_verdict", broken)
    found = environment.environment()["attention"]["implementations"]["blocks"]
    assert found == {"usable": False, "because": "blocks: no compiler"}


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
    found = environment.environment()["megatron"]
    assert (found["version"], found["in_range"]) == ("0.21.0rc0", False)
    assert found["path"] == str(tmp_path / "megatron")
    assert found["problem"].startswith("version 0.21.0rc0 is outside")


def test_without_torch_or_megatron_the_rest_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr(environment.importlib.util, "find_spec", lambda name: None)
    found = environment.environment()
    text = "\n".join(environment.as_text(found))
    assert "no CUDA device: torch cannot be imported" in text
    assert "attention on no device\n  torch cannot be imported" in text
    assert "no megatron.core is found; install megatron-core" in text
