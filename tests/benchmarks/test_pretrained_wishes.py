# SPDX-License-Identifier: Apache-2.0
"""Wishes beside shared lists: what they read, that they are causal and nested, predicted times."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from pretrained import wishes
from pretrained.arms import FP8, HALF, HALF_FP8, SCORES, WishSettings, parse_arm
from pretrained.block_scores import (
    Projection,
    half_of_channels,
    rounded_to_fp8,
    score_sides,
)
from pretrained.documents import KEY_VALUE
from pretrained.model import PretrainedError
from pretrained.reading import Asked, Reader
from pretrained_inputs import BLOCK, asked_of, documents, tiny_reader
from torch import Tensor

from sparsebalance_megatron.layer_budgets import DENSE

WHO = ("token-query-head", "token-kv-head", "tile-4", "tile-block")
SIZE, BLOCKS, CHANNELS = 8, 12, 8


@pytest.fixture(scope="module")
def reader() -> Reader:
    return tiny_reader()


def asked(seed: int = 0) -> Asked:
    """Sharp enough that shares lie on both sides of a gate."""
    found = asked_of(BLOCKS, SIZE, seed)
    return replace(found, q_QHD=found.q_QHD * 4)


def projection() -> Projection:
    generator = torch.Generator().manual_seed(5)
    sides = torch.randn(2, 2, CHANNELS, CHANNELS // 2, generator=generator)
    return Projection(query_GDJ=sides[0], key_GDJ=sides[1])


def read_blocks(some: Asked, who: str, budget: int, scores: str = "exact") -> Tensor:
    arm = parse_arm(f"previous-block {budget} first=1 wishes={who} scores={scores}")
    rule = wishes.WishRule(arm=arm, budgets=(budget,), projections=[projection()])
    return rule.reading(some, budget).read_CQN


def naive(some: Asked, who: str, budget: int, gate: float, most: int) -> tuple[Tensor, int]:
    """Lists and wishes, token by token; and entries that tiles had no room for."""
    group = some.q_QHD.shape[1] // some.k_TGD.shape[1]
    base = wishes.base_lists(some, parse_arm(f"previous-block {budget} first=1"), budget)
    each = 1 if who == "token-query-head" else group
    found = torch.zeros(some.q_QHD.shape[1] // each, len(some.q_QHD), BLOCKS, dtype=torch.bool)
    tile = {"tile-4": 4, "tile-block": SIZE}.get(who)
    cut = 0
    for reading in range(len(found)):
        heads = range(reading * each, (reading + 1) * each)
        entries: list[int] = []
        refused: set[int] = set()
        for token in range(len(some.q_QHD)):
            own = token // SIZE
            share = [0.0] * BLOCKS
            for head in heads:
                score = some.k_TGD[: token + 1, head // group] @ some.q_QHD[token, head]
                score = (score.double() * some.softmax_scale).tolist()
                parts = [0.0] * BLOCKS
                for block in range(own):
                    parts[block] = math.exp(max(score[block * SIZE : (block + 1) * SIZE]))
                if own:
                    parts[0] += math.exp(score[0])
                total = sum(parts) + sum(map(math.exp, score[own * SIZE :]))
                share = [max(*pair) for pair in zip(share, [x / total for x in parts], strict=True)]
            listed = set(base[heads[0] // group, token].nonzero().flatten().tolist())
            may = [block for block in range(1, own) if tile or block not in listed]
            best = max(may, key=lambda block: share[block], default=0)
            if tile and token % tile == 0:
                entries, refused = [], set()
            elif not tile:
                entries = []
            if best and share[best] >= gate and best not in listed | set(entries):
                if not tile or len(entries) < most:
                    entries.append(best)
                elif best not in refused:
                    refused.add(best)
                    cut += 1
            found[reading, token, sorted(listed | set(entries))] = True
    return found, cut


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize("most", [1, 8])
def test_wishes_are_those_of_a_naive_reading(
    who: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wishes, "MOST_TILE_WISHES", most)
    monkeypatch.setattr(wishes, "_ROWS_AT_ONCE", 2 * SIZE)
    some = asked()
    expected, cut = naive(some, who, 3, 0.1, most)
    arm = parse_arm(f"previous-block 3 first=1 wishes={who}")
    found = wishes.WishRule(arm=arm, budgets=(3,)).reading(some, 3)
    assert torch.equal(found.read_CQN, expected) and found.cut == cut
    assert cut > 0 if "tile" in who and most == 1 else cut == 0
    base = wishes.base_lists(some, arm, 3)
    per_head = base.repeat_interleave(len(expected) // len(base), 0)
    tile = arm.wishes.tile_of(SIZE) or 1
    entries = (expected & ~per_head)[:, tile - 1 :: tile].sum(-1).float().mean()
    assert found.wishes == pytest.approx(float(entries)) and found.wishes > 0


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("who", WHO)
def test_later_tokens_change_no_list(who: str, scores: str) -> None:
    some, other = asked(), asked(1)
    before = read_blocks(some, who, 4, scores)
    for changed in (1, 37, 40, 77):
        q_QHD, k_TGD = (
            torch.cat([one[:changed], 100 * two[changed:]])
            for one, two in ((some.q_QHD, other.q_QHD), (some.k_TGD, other.k_TGD))
        )
        after = read_blocks(replace(some, q_QHD=q_QHD, k_TGD=k_TGD), who, 4, scores)
        assert torch.equal(after[:, :changed], before[:, :changed])
        assert not torch.equal(after, before)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("who", WHO)
def test_what_is_read_is_part_of_what_a_larger_budget_reads(who: str, scores: str) -> None:
    for seed in range(3):
        reads = [read_blocks(asked(seed), who, budget, scores) for budget in range(2, BLOCKS + 1)]
        for less, more in pairwise(reads):
            assert not (less & ~more).any()
        assert reads[0].sum() < reads[-1].sum()


def test_no_wish_reads_as_the_package_does(reader: Reader) -> None:
    (document,) = documents(KEY_VALUE, 1)
    budgets = (3, DENSE, 5)
    arm = parse_arm("previous-block 3 first=1 wishes=tile-4 gate=2")
    rule = wishes.WishRule(arm=arm, budgets=budgets)
    expected = reader.product(
        document,
        block_size=BLOCK,
        selection="previous-block",
        budgets=budgets,
        sparse_init_block=1,
    )
    torch.testing.assert_close(reader.by_rule(document, BLOCK, rule).loss_X, expected.loss_X)
    assert rule.wished.wishes_L == (0.0, 0.0, 0.0) and rule.wished.read_L[1] == (1 + 32) / 2


def test_half_of_the_channels_serve_what_lies_in_half_of_them() -> None:
    """Keys of rank 4 in 8 channels: the product is exact; of rank 8 it is the closest of rank 4."""
    generator = torch.Generator().manual_seed(2)
    some = asked()
    basis = torch.randn(2, CHANNELS // 2, CHANNELS, generator=generator)
    low_TGD = torch.einsum("tgd,gdc->tgc", some.k_TGD[..., : CHANNELS // 2], basis)
    q_GQD = some.q_QHD.unflatten(1, (2, -1)).transpose(0, 1).flatten(1, 2)

    def error(k_TGD: Tensor) -> float:
        k_GTD = k_TGD.transpose(0, 1)
        found = half_of_channels(*((x.mT @ x).double() for x in (q_GQD, k_GTD)))
        sides = score_sides(some.q_QHD, k_TGD, HALF, found)
        q_GQJ = sides.query_QHD.unflatten(1, (2, -1)).transpose(0, 1).flatten(1, 2)
        exact = q_GQD @ k_GTD.mT
        off = (q_GQJ @ sides.key_TGD.transpose(0, 1).mT - exact).square().sum((1, 2))
        best = torch.linalg.svdvals(exact)[:, CHANNELS // 2 :].square().sum(-1)
        torch.testing.assert_close(off, best, rtol=1e-3, atol=1e-2)
        return float(off.sum() / exact.square().sum())

    assert error(low_TGD) < 1e-8 < 1e-3 < error(some.k_TGD) < 0.5


def test_fp8_rounds_each_vector_by_its_own_greatest_channel() -> None:
    some = asked()
    vectors = torch.cat([some.k_TGD, 1e4 * some.k_TGD[:1], torch.zeros(1, 2, CHANNELS)])
    found = rounded_to_fp8(vectors)
    assert torch.equal(found[: len(some.k_TGD)], rounded_to_fp8(some.k_TGD))
    greatest = vectors.abs().amax(-1, keepdim=True)
    # Three bits after the leading one, and a least step below 2^-15 of the greatest.
    assert ((found - vectors).abs() <= vectors.abs() / 16 + greatest * 2**-15).all()
    assert not torch.equal(found, vectors)


def test_what_cannot_be_read_is_refused() -> None:
    for words, message in (
        ("wishes=tile-x", "must be token-query-head"),
        ("wishes=tile-4 scores=int4", "scores=int4: must be one of exact"),
    ):
        with pytest.raises(PretrainedError, match=message):
            parse_arm(f"previous-block 3 {words}")
    arm = parse_arm("token-query-head 3 wishes=tile-4")
    with pytest.raises(PretrainedError, match="beside lists that blocks share"):
        wishes.base_lists(asked(), arm, 3)
    with pytest.raises(PretrainedError, match="blocks of 8 and tiles of 3: must be whole"):
        read_blocks(asked(), "tile-3", 3)
    for scores in (HALF, HALF_FP8):
        with pytest.raises(PretrainedError, match="needs projections"):
            score_sides(asked().q_QHD, asked().k_TGD, scores, None)
    assert score_sides(asked().q_QHD, asked().k_TGD, FP8, None).key_TGD.shape[2] == CHANNELS


def test_an_arm_is_read_from_its_words() -> None:
    arm = parse_arm("previous-block 8 layers=dense:1 wishes=tile-16 scores=half gate=0.05")
    assert arm.wishes == WishSettings(who="tile-16", scores=HALF, gate=0.05)
    assert parse_arm(arm.name) == arm
