# SPDX-License-Identifier: Apache-2.0
"""The check of selectors passes ours and the example, and finds selectors that break a rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from attention.cases import SELECTORS, example_selector
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.select.ranking import Ranking
from sparsebalance_megatron.attention.select.summaries import BlockSummaries
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.selector_check import SelectorError, check_selector

LOOKING_AHEAD = ("vertical-slash-last-queries",)
GOOD = {name: selector for name, selector in SELECTORS.items() if name not in LOOKING_AHEAD} | {
    "quest": example_selector()
}


@pytest.mark.parametrize("name", GOOD)
def test_good_selectors_pass(name: str) -> None:
    check_selector(GOOD[name])


def test_other_shapes_pass() -> None:
    check_selector(
        GOOD["token-kv-head"], block_size=8, query_heads=6, kv_heads=3, head_dim=24, seeds=(5,)
    )


@dataclass
class _Broken:
    """The default selector; subclasses break one thing."""

    by_token: bool = True
    sound: Any = SELECTORS["token-kv-head"]

    def summaries(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> BlockSummaries:
        return self.sound.summaries(q_THD, k_TGD, layout)

    def rank(self, *arguments: Any, **keywords: Any) -> Ranking:
        return self.sound.rank(*arguments, **keywords)

    def coverage(self, ranking: Ranking) -> Tensor:
        return self.sound.coverage(ranking)

    def select(self, ranking: Ranking, budgets_S: Tensor) -> Selection:
        return self.sound.select(ranking, budgets_S)


class _OverBudget(_Broken):
    def select(self, ranking: Ranking, budgets_S: Tensor) -> Selection:
        return self.sound.select(ranking, budgets_S + 1)


class _OwnBlockLast(_Broken):
    def select(self, ranking: Ranking, budgets_S: Tensor) -> Selection:
        found = self.sound.select(ranking, budgets_S)
        last_QC1 = found.counts_QC[..., None].long() - 1
        lists_QCK = found.indices_QCK.clone()
        lists_QCK[..., :1] = found.indices_QCK.gather(2, last_QC1)
        lists_QCK.scatter_(2, last_QC1, found.indices_QCK[..., :1])
        return replace(found, indices_QCK=lists_QCK)


class _ByChance(_Broken):
    def rank(self, *arguments: Any, **keywords: Any) -> Ranking:
        ranking = self.sound.rank(*arguments, **keywords)
        lists_QCK = ranking.indices_QCK.clone()
        # The second and the third place change places now and then.
        swapped_Q = torch.rand(len(lists_QCK)) < 0.5
        both_Q = (lists_QCK[:, :, 2] >= 0).all(1) & swapped_Q
        lists_QCK[both_Q] = lists_QCK[both_Q][:, :, [0, 2, 1, *range(3, lists_QCK.shape[2])]]
        return replace(ranking, indices_QCK=lists_QCK)


class _MeanOfTheSequence(_Broken):
    """Scores by keys less the mean key of the sequence: documents mix."""

    def summaries(self, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> BlockSummaries:
        sound = self.sound.summaries(q_THD, k_TGD, layout)
        return replace(sound, keys_NGD=sound.keys_NGD * sound.keys_NGD.sum(0).sign())


class _LastQuery(_Broken):
    """Every token asks with the last query of its block: ahead of itself."""

    def rank(self, q_THD: Tensor, summaries: BlockSummaries, rows: Any, **how: Any) -> Ranking:
        layout = rows.query_layout
        last_T = (layout.start_N + layout.length_N - 1)[layout.block_T]
        return self.sound.rank(q_THD[last_T], summaries, rows, **how)


class _FallingCoverage(_Broken):
    def coverage(self, ranking: Ranking) -> Tensor:
        return self.sound.coverage(ranking).flip(1)


class _Differentiable(_Broken):
    def coverage(self, ranking: Ranking) -> Tensor:
        return self.sound.coverage(ranking).requires_grad_()


@pytest.mark.parametrize(
    ("selector", "rule"),
    [
        (_OverBudget(), r"^lists: row \d+, head 0 reads .* at most"),
        (_OwnBlockLast(), "^lists: .* must begin with its own block"),
        (_Broken(by_token=False), "^lists: by_token is False"),
        (_FallingCoverage(), "^coverage: curves must rise"),
        (_ByChance(), "^determinism: the same sequence"),
        (_Differentiable(), "^determinism: .* gradient"),
        (_MeanOfTheSequence(), "^documents: what document 0 holds changes"),
        (_LastQuery(), r"^causality: what token \d+ and those after it hold changes the list"),
        (example_selector("query_block.py:LOOKAHEAD"), "^causality: "),
    ],
)
def test_every_rule_can_be_broken(selector: Any, rule: str) -> None:
    with pytest.raises(SelectorError, match=rule):
        check_selector(selector)
