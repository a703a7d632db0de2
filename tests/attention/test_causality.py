# SPDX-License-Identifier: Apache-2.0
"""Invariant 9: changing a token changes no output before it, the choice of blocks included.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import pytest
import torch
from attention.cases import SCALE, SELECTORS, SERVING, example_selector
from torch import Tensor

from sparsebalance_megatron.attention.api import budgeted_attention

BLOCK = 16
EVERY_SELECTOR = SELECTORS | {"quest": example_selector()}
CU_SEQLENS = [0, 21, 160, 197]
CHANGED = (1, 37, 52, 100, 101, 159, 190)
"""Tokens inside, at the beginning and at the end of blocks; the long document begins at 21."""
LOOKING_AHEAD = ("vertical-slash-last-queries",)
EVERY_PAIR = [*SERVING, ("quest", "tokens"), ("quest", "reference")]


def _qkv() -> list[Tensor]:
    generator = torch.Generator().manual_seed(11)
    return [2.0 * torch.randn(197, heads, 16, generator=generator) for heads in (4, 2, 2)]


def _before(token: int, qkv: list[Tensor], selection: str, implementation: str) -> list[Tensor]:
    """Outputs before a token, and gradients of a loss over them: out, lse, dq, dk, dv."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out_THD, lse_TH = budgeted_attention(
        *leaves,
        CU_SEQLENS,
        3,
        block_size=BLOCK,
        softmax_scale=SCALE,
        selection=EVERY_SELECTOR[selection],
        implementation=implementation,
    )
    out_THD[:token].square().sum().backward()
    return [x.detach()[:token] for x in (out_THD, lse_TH, *(leaf.grad for leaf in leaves))]


def _changes_before(token: int, selection: str, implementation: str) -> bool:
    """Whether other numbers in a token are seen before it."""
    expected = _before(token, _qkv(), selection, implementation)
    qkv = _qkv()
    for x in qkv:
        x[token] = -30.0 * x[token] + 5.0
    found = _before(token, qkv, selection, implementation)
    return not all(map(torch.equal, found, expected))


@pytest.mark.parametrize(
    ("selection", "implementation"), [pair for pair in EVERY_PAIR if pair[0] not in LOOKING_AHEAD]
)
def test_later_tokens_change_no_bit(selection: str, implementation: str) -> None:
    assert not any(_changes_before(token, selection, implementation) for token in CHANGED)


@pytest.mark.parametrize("implementation", ["blocks", "reference"])
@pytest.mark.parametrize("selection", LOOKING_AHEAD)
def test_some_look_ahead_as_documented(selection: str, implementation: str) -> None:
    """The help text of ``--sparse-balance-selection`` says so."""
    assert any(_changes_before(token, selection, implementation) for token in CHANGED)
