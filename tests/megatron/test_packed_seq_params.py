# SPDX-License-Identifier: Apache-2.0
"""Boundaries on a device are read once per micro-batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsebalance_megatron.megatron.packed_seq_params import LayoutCache

CPU = torch.device("cpu")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Tensors that were read from the host; once, though a mode of torch's may call it again."""
    seen: list[Tensor] = []
    read, within = Tensor.tolist, []

    def tolist(self: Tensor) -> object:
        if not within:
            seen.append(self)
        within.append(self)
        try:
            return read(self)
        finally:
            within.pop()

    monkeypatch.setattr(Tensor, "tolist", tolist)
    return seen


def test_a_tensor_is_read_once(reads: list[Tensor]) -> None:
    cache, cu_seqlens = LayoutCache(), torch.tensor([0, 20, 50])
    assert [cache.boundaries_of(cu_seqlens) for _ in range(3)] == [(0, 20, 50)] * 3
    assert len(reads) == 1


def test_another_tensor_and_a_changed_one_are_read_anew(reads: list[Tensor]) -> None:
    cache, cu_seqlens = LayoutCache(), torch.tensor([0, 20, 50])
    cache.boundaries_of(cu_seqlens)
    cu_seqlens[1] = 30
    assert cache.boundaries_of(cu_seqlens) == (0, 30, 50)
    assert cache.boundaries_of(torch.tensor([0, 9])) == (0, 9)
    assert cache.boundaries_of(cu_seqlens) == (0, 30, 50)
    assert len(reads) == 4


def test_inference_tensors_are_read_each_time() -> None:
    cache = LayoutCache()
    with torch.inference_mode():
        cu_seqlens = torch.tensor([0, 20, 50])
        assert cache.boundaries_of(cu_seqlens) == (0, 20, 50)
        cu_seqlens[1] = 30
        assert cache.boundaries_of(cu_seqlens) == (0, 30, 50)


def test_layers_of_a_micro_batch_share_a_layout() -> None:
    cache = LayoutCache()
    layout = cache.layout((0, 20, 50), 16, CPU)
    assert cache.layout((0, 20, 50), 16, CPU) is layout
    assert cache.layout((0, 50), 16, CPU).cu_seqlens == (0, 50)
    assert cache.layout((0, 50), 32, CPU).block_size == 32
