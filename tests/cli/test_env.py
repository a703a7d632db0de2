# SPDX-License-Identifier: Apache-2.0
"""``sparse-balance env``: versions against ranges, devices, attention that is really tried."""

import os
import sys
from pathlib import Path
from typing import get_args

import pytest
import torch

from sparsebalance_megatron import __version__, cli, supported
from sparsebalance_megatron.attention import self_check
from sparsebalance_megatron.cli import env
from sparsebalance_megatron.config import AttentionImplementation, Router, SparseBalanceConfig

Captured = pytest.CaptureFixture[str]


@pytest.mark.parametrize(
    ("known", "inside"),
    [("0.19", True), ("0.18.9", False), ("0.21.0rc1", False), ("0.20.0rc1+abc", True)],
)
def test_pre_releases_count_as_their_release(known: str, inside: bool) -> None:
    assert supported.is_within(known, supported.RANGES["megatron-core"]) is inside
    assert supported.is_within("2.8.0a0+5228986c39.nv25.6", supported.RANGES["torch"])


def test_versions_and_devices(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert f"sparsebalance-megatron {__version__}" in lines
    assert any(line.startswith(f"torch {torch.__version__}: supported") for line in lines)
    assert any(line.startswith("megatron 0.") and ": supported, in /" in line for line in lines)
    assert sum(line.startswith("cuda:") for line in lines) == torch.cuda.device_count()
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["env"]) == 2
    out, error = capsys.readouterr()
    assert ": no megatron.core is found; install megatron-core" in out
    assert "the package torch is not installed here" in error


@pytest.mark.nightly
def test_attention_is_checked(capsys: Captured) -> None:
    assert cli.main(["env", "--check"]) == 0
    said = capsys.readouterr().out.splitlines()
    if not torch.cuda.is_available() and "TRITON_INTERPRET" not in os.environ:
        for name in env._CHECKS:
            (line,) = (each for each in said if each.startswith(f"{name}: "))
            assert line.endswith('"auto"' if "triton" in name else ": right"), line


def test_everything_that_can_be_chosen_is_checked() -> None:
    settings = [SparseBalanceConfig(**choices) for choices, _ in env._CHECKS.values()]
    # FlashAttention-4 is checked where `profile` or training takes it.
    assert {each.attention for each in settings} == {*get_args(AttentionImplementation)} - {"fa4"}
    assert {each.router for each in settings} == {*get_args(Router)}


@pytest.mark.parametrize(("broken", "status"), [("triton", 0), ("reference", 1)])
@pytest.mark.parametrize("raises", [False, True])
def test_the_status_tells_of_what_a_cpu_should_run(
    broken: str, status: int, raises: bool, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def check(config: SparseBalanceConfig, *_: object) -> self_check.Verdict:
        off = broken in (config.attention, config.router)
        if off and raises:
            raise RuntimeError("no compiler\nlong trace")
        return self_check.Verdict(kernel="some", errors={"out": 2.0 if off else 0.5})

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(self_check, "check_attention", check)
    assert cli.main(["env", "--check"]) == status
    reason = "does not run: no compiler" if raises else "out is off by 2 times its tolerance"
    assert f"\n{broken}: {reason}\n" in capsys.readouterr().out


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
    assert supported.find_megatron() == (
        *(tmp_path / "megatron", "0.21.0rc0"),
        "version 0.21.0rc0 is outside >=0.19,<0.21; install one inside",
    )
