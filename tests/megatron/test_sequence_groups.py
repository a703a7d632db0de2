# SPDX-License-Identifier: Apache-2.0
"""Megatron's expert groups against the neighbouring ranks that plans take for them."""

from __future__ import annotations

import pytest
import torch
from megatron.core import parallel_state

from sparsebalance_megatron.config import ConfigError
from sparsebalance_megatron.megatron.sequence_groups import check_lockstep_ranks


@pytest.mark.parametrize(
    ("experts", "lockstep_ranks", "fits"),
    [
        ([0, 1], 2, True),
        ([2, 3], 2, True),
        ([0, 2], 2, False),
        ([1, 2], 2, False),
        ([0, 2], 4, True),
        ([0], 1, True),
        ([0, 1], 1, False),
    ],
)
def test_an_expert_group_must_be_neighbouring_ranks(
    experts: list[int], lockstep_ranks: int, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """World rank 2 d + t is tensor-parallel rank t of data-parallel rank d of four."""

    def expert_group() -> list[int]:
        return [2 * place + tensor for place in experts for tensor in (0, 1)]

    monkeypatch.setattr(parallel_state, "get_expert_tensor_and_model_parallel_group", expert_group)
    monkeypatch.setattr(
        parallel_state,
        "get_data_parallel_group",
        lambda with_context_parallel: [0, 2, 4, 6],
    )
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: group)
    if fits:
        check_lockstep_ranks(lockstep_ranks)
        return
    with pytest.raises(ConfigError, match=f"no part of {lockstep_ranks} neighbouring ones"):
        check_lockstep_ranks(lockstep_ranks)
