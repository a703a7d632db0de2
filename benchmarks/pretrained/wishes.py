# SPDX-License-Identifier: Apache-2.0
"""Wishes: past blocks outside a shared list that tokens ask for by the greatest score in a block.

A token's share of a past block is what softmax gives it among the greatest score of each past
block, the log-sum-exp of the own block's visible scores, and, for the first block, that of its
greatest score and its first key's. Nothing depends on a later token, on another token's share, or
on the budget of the list.

A token that wishes alone, by query head or by KV head (the greatest share of its query heads), asks
for the best past block outside the list and reads it. In a tile of R tokens and a KV head's query
heads each token asks for its best past block; if the list has it not, it becomes an entry, and the
tile's tokens read it from that token on. Either way a wish needs a share of at least the gate.

Shape legend: T tokens, Q rows that ask, H query heads, G KV heads, D head dim, L layers, N blocks,
C heads that read, R tokens of a tile, U query heads of a KV head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from quality.masked_attention import listed_blocks
from torch import Tensor
from torch.nn.functional import one_hot, scaled_dot_product_attention

from pretrained.arms import QUERY_HEAD, Arm, WishSettings
from pretrained.block_scores import Projection, ScoreSides, score_sides
from pretrained.model import PretrainedError
from pretrained.reading import Asked, Attend, Wished
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.layer_budgets import DENSE

MOST_TILE_WISHES = 8
"""Entries that wishes add to a tile; what is asked for beyond is cut, and counted."""
_ROWS_AT_ONCE = 256


@dataclass(kw_only=True)
class WishRule:
    """Reads by a selection's lists and wishes beside them; one object serves one document.

    Attributes:
        projections: by layer, for scores of half of the channels.
    """

    arm: Arm
    budgets: Sequence[int]
    projections: Sequence[Projection] | None = None
    wishes: list[float] = field(default_factory=list)
    read: list[float] = field(default_factory=list)
    cut: int = 0

    def __call__(self, asked: Asked) -> Attend | None:
        budget = self.budgets[asked.layer]
        if budget == DENSE:
            self.wishes.append(0.0)
            self.read.append(_visible_blocks(asked))
            return None
        found = self.reading(asked, budget)
        return lambda v_TGD: attend(asked, v_TGD, found.read_CQN)

    @torch.no_grad()
    def reading(self, asked: Asked, budget: int) -> "WishedBlocks":
        """What the rows of a layer read; it is counted."""
        settings = self.arm.wishes
        assert settings is not None, "the arm has wishes"
        projection = self.projections[asked.layer] if self.projections is not None else None
        found = wished(
            asked,
            base_lists(asked, self.arm, budget),
            score_sides(asked.q_QHD, asked.k_TGD, settings.scores, projection),
            settings,
        )
        self.wishes.append(found.wishes)
        self.read.append(float(found.read_CQN.sum(-1).float().mean()))
        self.cut += found.cut
        return found

    @property
    def wished(self) -> Wished:
        return Wished(wishes_L=tuple(self.wishes), read_L=tuple(self.read), cut=self.cut)


@dataclass(frozen=True, kw_only=True, eq=False)
class WishedBlocks:
    """Which blocks rows read: the list's and their wishes'. ``wishes`` and ``cut`` are those of
    :class:`.reading.Wished`, of one layer."""

    read_CQN: Tensor
    wishes: float
    cut: int


def base_lists(asked: Asked, arm: Arm, budget: int) -> Tensor:
    """bool [G, Q, N]: the blocks of the selection's lists, as the package makes them.

    Raises:
        PretrainedError: the lists belong to tokens, or are not those of blocks.
    """
    layout = asked.layouts.kv_layout
    selector = selector_named(arm.selection, first_blocks=arm.first_blocks)
    ranking = rank_sequence(
        *(selector, asked.q_QHD, asked.k_TGD, layout),
        softmax_scale=asked.softmax_scale,
        max_budget=budget,
        observe=False,
    )
    selection = selector.select(ranking, torch.tensor([budget]))
    if selection.by_token or selection.columns is not None:
        raise PretrainedError(f"arm {arm.name!r}: wishes are beside lists that blocks share")
    return listed_blocks(selection)[layout.block_T].transpose(0, 1)


def wished(
    asked: Asked, listed_GQN: Tensor, sides: ScoreSides, settings: WishSettings
) -> WishedBlocks:
    """What rows read with their wishes, some rows at a time.

    Raises:
        PretrainedError: a length is not one of whole blocks, or a block not one of whole tiles.
    """
    block_size, tokens = asked.layouts.kv_layout.block_size, len(asked.k_TGD)
    tile = settings.tile_of(block_size)
    if tokens % block_size or block_size % max(tile, 1):
        raise PretrainedError(
            f"wishes: {tokens} tokens in blocks of {block_size} and tiles of {tile}: must be whole "
            "blocks of whole tiles"
        )
    at_once = max(block_size, _ROWS_AT_ONCE // block_size * block_size)
    parts = []
    for begin in range(0, tokens, at_once):
        end = min(begin + at_once, tokens)
        share_HQN = shares(asked, sides, begin, end)
        listed = listed_GQN[:, begin:end]
        if tile:
            parts.append(_tile_wishes(share_HQN, listed, tile, settings.gate))
        else:
            parts.append(_token_wishes(share_HQN, listed, settings))
    rows = tokens // max(tile, 1)
    heads = parts[0].read_CQN.shape[0]
    return WishedBlocks(
        read_CQN=torch.cat([each.read_CQN for each in parts], 1),
        wishes=sum(each.wishes for each in parts) / (rows * heads),
        cut=sum(each.cut for each in parts),
    )


def shares(asked: Asked, sides: ScoreSides, begin: int, end: int) -> Tensor:
    """Shares of all blocks, [H, rows, N], 0 of later ones, for rows of whole blocks."""
    layout, heads = asked.layouts.kv_layout, asked.k_TGD.shape[1]
    size, rows = layout.block_size, end - begin
    q_GUQD = asked.q_QHD[begin:end].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
    k_GTD = asked.k_TGD[:end].transpose(0, 1)
    side_GUQD = sides.query_QHD[begin:end].unflatten(1, (heads, -1)).permute(1, 2, 0, 3)
    past_GTD = sides.key_TGD[:end].transpose(0, 1)
    score_GUQT = (side_GUQD.flatten(1, 2) @ past_GTD.mT).unflatten(1, (-1, rows))
    best_GUQN = score_GUQT.unflatten(-1, (-1, size)).amax(-1) * asked.softmax_scale
    own_Q = torch.arange(begin, end) // size
    past_QN = torch.arange(end // size) < own_Q[:, None]
    best_GUQN = best_GUQN.masked_fill(~past_QN, -torch.inf)
    first_GUQ = (q_GUQD @ k_GTD[:, None, 0, :, None])[..., 0] * asked.softmax_scale
    best_GUQN[..., 0] = torch.where(
        past_QN[:, 0], torch.logaddexp(best_GUQN[..., 0], first_GUQ), -torch.inf
    )
    # The own block is scored exactly, as far as it is visible.
    q_blocks = q_GUQD.unflatten(2, (-1, size))
    k_blocks = k_GTD[:, begin:].unflatten(1, (-1, size))[:, None]
    later = torch.ones(size, size, dtype=torch.bool).triu(1)
    own_scores = (q_blocks @ k_blocks.mT * asked.softmax_scale).masked_fill(later, -torch.inf)
    own_GUQ = own_scores.logsumexp(-1).flatten(2, 3)
    best_GUQN[..., torch.arange(rows), own_Q] = own_GUQ
    share_HQN = best_GUQN.softmax(-1).flatten(0, 1)
    return torch.nn.functional.pad(share_HQN, (0, layout.blocks - share_HQN.shape[2]))


def _may_be_wished(share_CQN: Tensor, listed_CQN: Tensor) -> Tensor:
    """Shares of past blocks but the first; the own block, which every list has, is the last."""
    number_N = torch.arange(share_CQN.shape[2])
    own_Q1 = (listed_CQN[0] * number_N).amax(-1, keepdim=True)
    return share_CQN.masked_fill((number_N == 0) | (number_N >= own_Q1), 0.0)


def _token_wishes(share_HQN: Tensor, listed_GQN: Tensor, settings: WishSettings) -> WishedBlocks:
    heads = len(listed_GQN)
    if settings.who == QUERY_HEAD:
        listed_GQN = listed_GQN.repeat_interleave(len(share_HQN) // heads, 0)
    else:
        share_HQN = share_HQN.unflatten(0, (heads, -1)).amax(1)
    outside_CQN = _may_be_wished(share_HQN, listed_GQN).masked_fill(listed_GQN, 0.0)
    best = outside_CQN.max(-1)
    asks_CQ = best.values >= settings.gate
    wish_CQN = one_hot(best.indices, share_HQN.shape[2]).bool() & asks_CQ[..., None]
    return WishedBlocks(read_CQN=listed_GQN | wish_CQN, wishes=float(asks_CQ.sum()), cut=0)


def _tile_wishes(share_HQN: Tensor, listed_GQN: Tensor, tile: int, gate: float) -> WishedBlocks:
    share_GQN = share_HQN.unflatten(0, (len(listed_GQN), -1)).amax(1)
    best = _may_be_wished(share_GQN, listed_GQN).max(-1)
    asks_GQ1 = (best.values >= gate)[..., None]
    asked_GQN = one_hot(best.indices, share_GQN.shape[2]).bool() & asks_GQ1 & ~listed_GQN
    asked_GnRN = asked_GQN.unflatten(1, (-1, tile))
    new_GnRN = asked_GnRN & (asked_GnRN.cumsum(2) == 1)
    place_GnR1 = new_GnRN.any(-1, keepdim=True).cumsum(2)
    entry_GnRN = new_GnRN & (place_GnR1 <= MOST_TILE_WISHES)
    entries = int(entry_GnRN.sum())
    return WishedBlocks(
        read_CQN=listed_GQN | (entry_GnRN.cumsum(2) > 0).flatten(1, 2),
        wishes=float(entries),
        cut=int(new_GnRN.sum()) - entries,
    )


def attend(asked: Asked, v_TGD: Tensor, read_CQN: Tensor) -> Tensor:
    """Causal attention over the blocks that each head's rows read, [Q, H, D]."""
    size, tokens = asked.layouts.kv_layout.block_size, len(v_TGD)
    q_HQD, k_GTD, v_GTD = (x.transpose(0, 1) for x in (asked.q_QHD, asked.k_TGD, v_TGD))
    read_HQN = read_CQN.repeat_interleave(len(q_HQD) // len(read_CQN), 0)
    at_once = max(size, _ROWS_AT_ONCE // size * size)
    parts = []
    for begin in range(0, tokens, at_once):
        end = min(begin + at_once, tokens)
        read_HQT = read_HQN[:, begin:end, : end // size].repeat_interleave(size, -1)
        read_HQT &= torch.arange(end) <= torch.arange(begin, end)[:, None]
        out_1HQD = scaled_dot_product_attention(
            *(q_HQD[None, :, begin:end], k_GTD[None, :, :end], v_GTD[None, :, :end]),
            attn_mask=read_HQT[None],
            scale=asked.softmax_scale,
            enable_gqa=True,
        )
        parts.append(out_1HQD[0].transpose(0, 1))
    return torch.cat(parts)


def _visible_blocks(asked: Asked) -> float:
    return (asked.layouts.kv_layout.blocks + 1) / 2
