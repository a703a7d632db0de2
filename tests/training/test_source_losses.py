# SPDX-License-Identifier: Apache-2.0
"""Losses by source against a loop over tokens."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from sparsebalance_megatron.training.source_losses import losses_by_source, token_sources

LENGTHS, SOURCES = (3, 1, 4), (2, 0, 2)
CU_SEQLENS = (0, 3, 4, 8, 10)
"""The last two tokens are padding."""


def micro_batch(share: Any = None) -> Any:
    return SimpleNamespace(
        cu_seqlens=CU_SEQLENS,
        plan=SimpleNamespace(lengths_tokens=LENGTHS),
        share=share,
        source_S=np.array(SOURCES),
    )


def test_every_token_has_the_source_of_its_sample() -> None:
    assert token_sources(micro_batch()).tolist() == [2, 2, 2, 0, 2, 2, 2, 2, 0, 0]
    share = SimpleNamespace(tokens_T=np.array([2, 3, 9]), padding_tokens=1)
    assert token_sources(micro_batch(share)).tolist() == [2, 0, 0, 0]


def test_sums_are_those_of_a_loop_over_tokens() -> None:
    generator = torch.Generator().manual_seed(3)
    losses_1T = torch.rand(1, 10, generator=generator)
    mask_1T = torch.tensor([[1.0, 0, 1, 1, 0, 1, 1, 1, 0, 0]])
    sums_X2 = losses_by_source(losses_1T, mask_1T, micro_batch(), 4)
    expected = np.zeros((4, 2))
    for place, source in enumerate([2, 2, 2, 0, 2, 2, 2, 2]):
        weight = float(mask_1T[0, place])
        expected[source] += float(losses_1T[0, place]) * weight, weight
    assert sums_X2 is not None
    np.testing.assert_allclose(sums_X2.numpy(), expected, rtol=1e-15)


def test_a_model_that_gives_no_loss_per_token_has_none_by_source() -> None:
    assert losses_by_source(torch.ones(1), torch.ones(1, 10), micro_batch(), 4) is None
