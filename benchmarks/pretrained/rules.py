# SPDX-License-Identifier: Apache-2.0
"""Rules that list blocks: oracles and windows.

A new selection is a function of :class:`.reading.Asked`, a budget and the number of first blocks
that gives a :class:`Selection`, and an entry of :data:`EXPERIMENTS`. The budget counts the own
block and the first blocks of the document, which are always read.

Shape legend: T tokens, Q rows that select, H query heads, G KV heads, D head dim, C heads that
select, N blocks of the document.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from pretrained.reading import Asked, Rule
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.layer_budgets import DENSE

_ROWS_AT_ONCE = 1024
_OWN, _FIRST = 3e38, 2e38
"""Scores of blocks that are read whatever the others' are."""


def oracle_token(asked: Asked, budget: int, first_blocks: int) -> Selection:
    """The blocks that hold most of the softmax mass of a token's query head."""
    mass_CQN = torch.cat(list(masses(asked)), 1)
    return best_blocks(asked, mass_CQN, budget, first_blocks, by_token=True)


def oracle_block(asked: Asked, budget: int, first_blocks: int) -> Selection:
    """The blocks that hold most of the mass of a block of queries; it looks ahead in the block."""
    heads, layout = asked.k_TGD.shape[1], asked.layouts.query_layout
    mass_NGN = torch.zeros(layout.blocks, heads, asked.layouts.kv_layout.blocks)
    row = 0
    for mass_HQN in masses(asked):
        block_Q = layout.block_T[row : row + mass_HQN.shape[1]]
        row += mass_HQN.shape[1]
        mass_NGN.index_add_(0, block_Q, mass_HQN.unflatten(0, (heads, -1)).sum(1).transpose(0, 1))
    return best_blocks(asked, mass_NGN.transpose(0, 1), budget, first_blocks, by_token=False)


def window(asked: Asked, budget: int, first_blocks: int) -> Selection:
    """The last blocks, and the first ones."""
    blocks, rows = asked.layouts.kv_layout.blocks, asked.layouts.query_layout.blocks
    late_CQN = torch.arange(float(blocks)).expand(asked.k_TGD.shape[1], rows, -1)
    return best_blocks(asked, late_CQN, budget, first_blocks, by_token=False)


EXPERIMENTS: Mapping[str, Callable[..., Selection]] = {
    "oracle-token": oracle_token,
    "oracle-block": oracle_block,
    "window": window,
}
"""Name of a selection -> function of what is asked, the budget and the number of first blocks."""
BY_TOKEN = ("oracle-token",)
"""Those whose lists belong to single tokens, as those of built-in token selections."""


def rule_of(selection: str, budgets: tuple[int, ...], first_blocks: int) -> Rule:
    """The rule of an experiment; :data:`DENSE` layers read everything."""

    def rule(asked: Asked) -> Selection | None:
        budget = budgets[asked.layer]
        if budget == DENSE:
            return None
        return EXPERIMENTS[selection](asked, budget, first_blocks)

    return rule


def masses(asked: Asked) -> Iterator[Tensor]:
    """Softmax mass of every block, [H, some rows, N], of some query tokens and then of the next."""
    layout, heads = asked.layouts.kv_layout, asked.k_TGD.shape[1]
    tokens = len(asked.k_TGD)
    keys_GDT = asked.k_TGD.permute(1, 2, 0)
    for begin in range(0, len(asked.q_QHD), _ROWS_AT_ONCE):
        q_QHD = asked.q_QHD[begin : begin + _ROWS_AT_ONCE]
        end = -(-(begin + len(q_QHD)) // layout.block_size) * layout.block_size
        seen = min(tokens, end)
        q_GED = q_QHD.unflatten(1, (heads, -1)).permute(1, 2, 0, 3).flatten(1, 2)
        score_HQT = (q_GED @ keys_GDT[..., :seen]).unflatten(1, (-1, len(q_QHD))).flatten(0, 1)
        later_QT = torch.arange(seen) > torch.arange(len(q_QHD))[:, None] + begin
        share_HQT = (score_HQT * asked.softmax_scale).masked_fill_(later_QT, -torch.inf).softmax(-1)
        mass_HQN = pad(share_HQT, (0, end - seen)).unflatten(2, (-1, layout.block_size)).sum(-1)
        yield pad(mass_HQN, (0, layout.blocks - mass_HQN.shape[2]))


def best_blocks(
    asked: Asked, score_CQN: Tensor, budget: int, first_blocks: int, *, by_token: bool
) -> Selection:
    """Lists of the own block, the first blocks and the past blocks of the best scores; -inf is
    never read."""
    own_Q1 = asked.layouts.kv_block(by_token=by_token)[:, None]
    number_N = torch.arange(score_CQN.shape[2])
    score_CQN = score_CQN.masked_fill(number_N < first_blocks, _FIRST)
    score_CQN = score_CQN.masked_fill(number_N > own_Q1, -torch.inf)
    score_CQN = score_CQN.masked_fill(number_N == own_Q1, _OWN)
    best = score_CQN.topk(min(budget, len(number_N)), -1)
    return Selection(
        indices_QCK=best.indices.transpose(0, 1).int().contiguous(),
        counts_QC=(best.values > -torch.inf).sum(-1).T.int().contiguous(),
        by_token=by_token,
        query_layout=asked.layouts.query_layout,
        kv_layout=asked.layouts.kv_layout,
        own_block_N=asked.layouts.own_block_N,
    )
