# SPDX-License-Identifier: Apache-2.0
"""Megatron's FLOP count sees every row once, however many ranks share it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sparsebalance_megatron.training import forward_step

CU_SEQLENS = torch.tensor([0, 3, 10], dtype=torch.int32)


def packed(member: int | None) -> SimpleNamespace:
    """Of a run that shares no rows, or of a member of those that share this one."""
    shared = None if member is None else SimpleNamespace(group=SimpleNamespace(member=member))
    return SimpleNamespace(cu_seqlens_q=CU_SEQLENS, micro_batch=SimpleNamespace(shared=shared))


@pytest.mark.parametrize(
    ("member", "context_ranks", "times"), [(None, 1, 1), (0, 1, 1), (1, 1, 0), (0, 4, 4), (3, 4, 0)]
)
def test_a_row_is_counted_as_often_as_megatron_divides(
    monkeypatch: pytest.MonkeyPatch, member: int | None, context_ranks: int, times: int
) -> None:
    """Every rank feeds something, or it would leave out the collective that adds up."""
    training = pytest.importorskip("megatron.training.training")
    if not hasattr(training, "update_seqlen_stats_from_cu_seqlens"):
        pytest.skip("this megatron-core counts no sequences")
    fed: list[float] = []
    monkeypatch.setattr(
        training,
        "update_seqlen_stats_from_cu_seqlens",
        lambda cu_seqlens: fed.append(float(cu_seqlens.diff().sum())),
    )
    monkeypatch.setattr(
        forward_step.parallel_state, "get_context_parallel_world_size", lambda: context_ranks
    )
    forward_step.count_sequences(packed(member))
    assert fed == ([10.0] * times or [0.0])
