# SPDX-License-Identifier: Apache-2.0
"""The check of kernels before training: an error on all ranks where one has wrong kernels."""

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PROGRAMS, train
from step_cases import SHAPE

from sparsebalance_megatron.attention.kernels import blocks, dense, tokens
from sparsebalance_megatron.config import SparseBalanceConfig
from sparsebalance_megatron.megatron.kernel_check import KernelCheckError, check_kernels


def _checked(**choices: Any) -> str:
    config = SparseBalanceConfig(**{"selection": "token-query-head", "block_size": 16} | choices)
    return check_kernels(config, SHAPE, "float32", torch.device("cpu"))


def _fail(*_: Any, **__: Any) -> Any:
    raise MemoryError("no registers")


@pytest.mark.parametrize("block_size", [16, 2**20])
def test_right_kernels_give_a_line(block_size: int) -> None:
    """Documents of some blocks of 2**20 tokens would not fit memory; smaller ones are checked."""
    said = _checked(block_size=block_size)
    assert f"agree with the reference (cpu, torch {torch.__version__})" in said
    assert said.endswith("; dense documents run on torch's FlashAttention")
    assert _checked(attention="reference").endswith("; dense documents run on lists")


def test_wrong_kernels_stop_with_the_way_on(monkeypatch: pytest.MonkeyPatch) -> None:
    right = tokens.backward
    monkeypatch.setattr(
        tokens, "backward", lambda dout, saved: tuple(1.1 * x for x in right(dout, saved))
    )
    with pytest.raises(
        KernelCheckError, match=r"--sparse-balance-config attention=.*TRITON_PTXAS_PATH"
    ):
        _checked()


def test_a_failure_of_a_compiler_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "forward", _fail)
    with pytest.raises(KernelCheckError, match=r"MemoryError: no registers.*--sparse-balance"):
        _checked()


def test_kernels_of_dense_layers_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "forward", _fail)
    _checked()
    with pytest.raises(KernelCheckError, match="kernel check of previous-block"):
        _checked(layer_budgets="dense:0")


def test_wrong_kernels_of_dense_documents_stop_with_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(KernelCheckError, match=r'kernel "fa4", needs CUDA.*use .*=torch'):
        _checked(dense_attention="fa4")
    right = dense.backward
    monkeypatch.setattr(
        dense, "backward", lambda dout, saved: tuple(1.1 * x for x in right(dout, saved))
    )
    with pytest.raises(KernelCheckError, match=r"dense dq .* train with .*dense-attention=torch"):
        _checked()


@pytest.mark.distributed
def test_all_ranks_stop_where_the_kernels_of_one_are_wrong(documents: Path) -> None:
    program = (str(PROGRAMS / "failing_rank.py"), "kernels", "0")
    run = train(2, documents, "--sparse-balance-device", "cpu", program=program, timeout_s=120)
    assert run.exit_code != 0
    assert "KernelCheckError: kernel check" in run.output
    assert "(rank 1)" in run.output
    assert not run.losses
