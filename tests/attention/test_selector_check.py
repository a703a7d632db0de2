# SPDX-License-Identifier: Apache-2.0
"""The check of selectors passes ours and the example, and finds selectors that break a rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention.cases import SELECTORS, example_selector
from attention.selector_check import SelectorError, check_selector
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.select.ranking import Ranking
from sparsebalance_megatron.attention.select.summaries import BlockSummaries
from sparsebalance_megatron.attention.selection import Selection

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


SOUND = SELECTORS["token-kv-head"]


class _Broken:
    """The default selector with methods in the place of its own."""

    def __init__(self, *, by_token: bool = True, **methods: Callable[..., Any]) -> None:
        self.by_token = by_token
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(SOUND, name)


def _own_block_last(ranking: Ranking, budgets_S: Tensor) -> Selection:
    found = SOUND.select(ranking, budgets_S)
    last_QC1 = found.counts_QC[..., None].long() - 1
    lists_QCK = found.indices_QCK.clone()
    lists_QCK[..., :1] = found.indices_QCK.gather(2, last_QC1)
    lists_QCK.scatter_(2, last_QC1, found.indices_QCK[..., :1])
    return replace(found, indices_QCK=lists_QCK)


def _by_chance(*arguments: Any, **keywords: Any) -> Ranking:
    """The second and the third place change places now and then."""
    ranking = SOUND.rank(*arguments, **keywords)
    lists_QCK = ranking.indices_QCK.clone()
    both_Q = (lists_QCK[:, :, 2] >= 0).all(1) & (torch.rand(len(lists_QCK)) < 0.5)
    lists_QCK[both_Q] = lists_QCK[both_Q][:, :, [0, 2, 1, *range(3, lists_QCK.shape[2])]]
    return replace(ranking, indices_QCK=lists_QCK)


def _mean_of_the_sequence(q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> BlockSummaries:
    """Keys less the mean key of the sequence: documents mix."""
    sound = SOUND.summaries(q_THD, k_TGD, layout)
    return replace(sound, keys_NGD=sound.keys_NGD * sound.keys_NGD.sum(0).sign())


def _last_query(q_THD: Tensor, summaries: BlockSummaries, rows: Any, **how: Any) -> Ranking:
    """Every token asks with the last query of its block: ahead of itself."""
    layout = rows.query_layout
    last_T = (layout.start_N + layout.length_N - 1)[layout.block_T]
    return SOUND.rank(q_THD[last_T], summaries, rows, **how)


@pytest.mark.parametrize(
    ("selector", "rule"),
    [
        (
            _Broken(select=lambda ranking, budgets_S: SOUND.select(ranking, budgets_S + 1)),
            r"^lists: row \d+, head 0 reads .* at most",
        ),
        (_Broken(select=_own_block_last), "^lists: .* must begin with its own block"),
        (_Broken(by_token=False), "^lists: by_token is False"),
        (
            _Broken(coverage=lambda ranking: SOUND.coverage(ranking).flip(1)),
            "^coverage: curves must rise",
        ),
        (_Broken(rank=_by_chance), "^determinism: the same sequence"),
        (
            _Broken(coverage=lambda ranking: SOUND.coverage(ranking).requires_grad_()),
            "^determinism: .* gradient",
        ),
        (_Broken(summaries=_mean_of_the_sequence), "^documents: what document 0 holds changes"),
        (
            _Broken(rank=_last_query),
            r"^causality: what token \d+ and those after it hold changes the list",
        ),
        (example_selector("query_block.py:LOOKAHEAD"), "^causality: "),
        # All other rules hold.
        *((SELECTORS[name], "^causality: ") for name in LOOKING_AHEAD),
    ],
)
def test_every_rule_can_be_broken(selector: Any, rule: str) -> None:
    with pytest.raises(SelectorError, match=rule):
        check_selector(selector)
