# SPDX-License-Identifier: Apache-2.0
"""The check of kernels before training: kept where it passed, an error on all ranks where not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from attention import test_self_check
from harness import PROGRAMS, train
from step_cases import SHAPE

from sparsebalance_megatron.attention.kernels import tokens
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.megatron.kernel_check import (
    KernelCheckError,
    cache_directory,
    check_kernels,
    ensure_checked,
)

CPU = torch.device("cpu")
SMALL = {"query_heads": 4, "head_dim": 16, "block_size": 16, "dtype": "float32"}
CASE = dataclasses.replace(test_self_check.CASE, **SMALL)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return cache_directory()


def _kept(cache: Path) -> list[Path]:
    return sorted(cache.glob("*"))


def _fail(*_: Any, **__: Any) -> Any:
    raise MemoryError("no registers")


def test_a_case_that_passed_is_not_checked_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = ensure_checked(CASE, CPU)
    (file,) = _kept(cache)
    assert str(file) in line and '"tokens"' in line
    monkeypatch.setattr(tokens, "forward", _fail)
    assert str(file) in ensure_checked(CASE, CPU)


@pytest.mark.parametrize(
    "change",
    [
        {"head_dim": 32},
        {"block_size": 32},
        {"dtype": "bfloat16"},
        {"selection": "previous-block"},
        {"implementation": "reference"},
    ],
)
def test_another_case_is_checked(cache: Path, change: dict[str, Any]) -> None:
    ensure_checked(CASE, CPU)
    ensure_checked(dataclasses.replace(CASE, **change), CPU)
    assert len(_kept(cache)) == 2


def test_another_torch_is_checked(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ensure_checked(CASE, CPU)
    monkeypatch.setattr(torch, "__version__", "99")
    ensure_checked(CASE, CPU)
    assert len(_kept(cache)) == 2


def test_wrong_kernels_stop_with_the_way_on_and_are_not_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = tokens.backward
    monkeypatch.setattr(
        tokens, "backward", lambda dout, saved: tuple(1.1 * x for x in right(dout, saved))
    )
    with pytest.raises(
        KernelCheckError, match=r"--sparse-balance-config attention .*TRITON_PTXAS_PATH"
    ):
        ensure_checked(CASE, CPU)
    assert _kept(cache) == []


def test_a_failure_of_a_compiler_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "forward", _fail)
    with pytest.raises(KernelCheckError, match=r"MemoryError: no registers.*--sparse-balance"):
        ensure_checked(CASE, CPU)


def test_a_cache_that_cannot_be_written_stops_nothing(cache: Path) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file")
    assert "not kept" in ensure_checked(CASE, CPU)


@pytest.mark.distributed
def test_all_ranks_stop_where_the_kernels_of_one_are_wrong(documents: Path) -> None:
    program = (str(PROGRAMS / "failing_rank.py"), "kernels", "0")
    run = train(2, documents, "--sparse-balance-device", "cpu", program=program, timeout_s=120)
    assert run.exit_code != 0
    assert "KernelCheckError: kernel check" in run.output
    assert "(rank 1)" in run.output
    assert not run.losses


def test_the_largest_blocks_are_checked_on_smaller_ones_on_a_cpu(cache: Path) -> None:
    """Documents of some blocks of 2**20 tokens would not fit memory."""
    line = check_kernels(SparseBalanceConfig(block_size=2**20), SHAPE, "float32", CPU, keep=False)
    assert "agree with the reference" in line
    assert _kept(cache) == []
