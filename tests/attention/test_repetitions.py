# SPDX-License-Identifier: Apache-2.0
"""Attention to far repetitions against its definition."""

import numpy as np
import pytest
import torch

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.repetitions import Repetitions, copies_T

BLOCK, HEADS, KV_HEADS, DIM, SCALE = 4, 4, 2, 8, 0.4


def _inputs(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    q_THD, k_TGD = (
        2.0 * torch.randn(tokens, heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS)
    )
    return q_THD, k_TGD, torch.randint(30, (tokens,), generator=generator)


def _naive(q_THD, k_TGD, tokens_T, head: int) -> tuple[list[float], list[int]]:
    """Mass and number of queries of one document and head, of matching and copying."""
    mass, queries = [0.0, 0.0], [0, 0]
    tokens = tokens_T.tolist()
    for row in range(3 * BLOCK, len(tokens)):
        keys = k_TGD[: row + 1, head * KV_HEADS // HEADS].double()
        mass_T = (keys @ q_THD[row, head].double() * SCALE).softmax(0)
        far = range(BLOCK, BLOCK * (row // BLOCK - 1))
        for kind in (0, 1):
            if row + kind < len(tokens):
                alike = [place for place in far if tokens[place] == tokens[row + kind]]
                if 1 <= len(alike) <= 2:
                    mass[kind] += float(mass_T[alike].sum())
                    queries[kind] += 1
    return mass, queries


def test_mass_and_queries_are_those_of_the_definition_in_every_document() -> None:
    q_THD, k_TGD, tokens_T = _inputs(90)
    cu_seqlens = [0, 12, 50, 90]
    found = Repetitions(3, HEADS, torch.device("cpu"))
    found.tokens_T = tokens_T
    found.add(1, q_THD, k_TGD, packed_layout(cu_seqlens, BLOCK, "cpu"), softmax_scale=SCALE)
    for head in range(HEADS):
        parts = [
            _naive(q_THD[begin:end], k_TGD[begin:end], tokens_T[begin:end], head)
            for begin, end in ((12, 50), (50, 90))
        ]
        for kind in (0, 1):
            assert found.queries_ALH[kind, 1, head] == sum(each[1][kind] for each in parts) > 10
            expected = sum(each[0][kind] for each in parts)
            assert float(found.mass_ALH[kind, 1, head]) == pytest.approx(expected, rel=1e-5)
    assert not found.queries_ALH[:, ::2].any()


def test_heads_of_tensor_parallel_ranks_add_up() -> None:
    q_THD, k_TGD, tokens_T = _inputs(70)
    layout = packed_layout([0, 70], BLOCK, "cpu")
    whole, parts = (Repetitions(1, HEADS, torch.device("cpu")) for _ in range(2))
    whole.tokens_T = parts.tokens_T = tokens_T
    whole.add(0, q_THD, k_TGD, layout, softmax_scale=SCALE)
    for head in range(KV_HEADS):
        own = slice(2 * head, 2 * head + 2)
        keys = k_TGD[:, head : head + 1]
        parts.add(0, q_THD[:, own], keys, layout, softmax_scale=SCALE, first_head=own.start)
    torch.testing.assert_close(whole.mass_ALH, parts.mass_ALH)
    assert torch.equal(whole.queries_ALH, parts.queries_ALH)


def test_a_layer_is_as_sensitive_as_its_best_head_at_what_it_does_best() -> None:
    found = Repetitions(4, 2, torch.device("cpu"))
    assert found.sensitivity_L() == [0.0] * 4
    found.queries_ALH += 10.0
    found.mass_ALH[0, :, 1] = torch.tensor([4.0, 0.0, 1.0, 0.0])
    found.mass_ALH[1, :, 0] = torch.tensor([0.0, 0.2, 0.15, 0.0])
    assert found.sensitivity_L() == pytest.approx([1.0, 1.0, 0.75, 0.0])


@pytest.mark.parametrize("seed", range(4))
def test_copies_continue_two_tokens_as_far_blocks_did(seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(4, size=60)

    def copies(row: int) -> bool:
        far = range(BLOCK, BLOCK * (row // BLOCK - 1))
        three = tokens[row - 1 : row + 2].tolist()
        return len(three) == 3 and any(tokens[at - 2 : at + 1].tolist() == three for at in far)

    expected = [row > 0 and copies(row) for row in range(len(tokens))]
    assert copies_T(tokens, block_size=BLOCK).tolist() == expected
    assert 5 < sum(expected) < len(tokens) - 5
