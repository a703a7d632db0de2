# SPDX-License-Identifier: Apache-2.0
"""The check of selectors passes ours and the example, and finds selectors that break a rule."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from attention.cases import SELECTORS, example_selector
from attention.selector_check import SelectorError, check_selector
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.select.summaries import BlockSummaries

GOOD = SELECTORS | {"quest": example_selector()}


@pytest.mark.parametrize("name", GOOD)
def test_good_selectors_pass(name: str) -> None:
    check_selector(GOOD[name])


def test_other_shapes_pass() -> None:
    check_selector(
        GOOD["token-kv-head"], block_size=8, query_heads=6, kv_heads=3, head_dim=24, seeds=(5,)
    )


SOUND = SELECTORS["token-kv-head"]
TURNS = itertools.cycle((0, 1))


class _Broken:
    """The default selector with methods in the place of its own."""

    def __init__(self, *, by_token: bool = True, **methods: Callable[..., Any]) -> None:
        self.by_token = by_token
        vars(self).update(methods)

    def __getattr__(self, name: str) -> Any:
        return getattr(SOUND, name)


def _mean_of_the_sequence(q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout) -> BlockSummaries:
    """Keys less the mean key of the sequence: documents mix."""
    sound = SOUND.summaries(q_THD, k_TGD, layout)
    return replace(sound, keys_NGD=sound.keys_NGD * sound.keys_NGD.sum(0).sign())


@pytest.mark.parametrize(
    ("selector", "rule"),
    [
        (
            _Broken(select=lambda ranking, budgets_S: SOUND.select(ranking, budgets_S + 1)),
            r"^lists: row \d+, head 0 reads .* at most",
        ),
        (_Broken(by_token=False), "^lists: by_token is False"),
        (
            _Broken(coverage=lambda ranking: SOUND.coverage(ranking).flip(1)),
            "^coverage: curves must rise",
        ),
        (
            _Broken(
                select=lambda ranking, budgets_S: SOUND.select(ranking, budgets_S - next(TURNS))
            ),
            "^determinism: the same sequence",
        ),
        (
            _Broken(coverage=lambda ranking: SOUND.coverage(ranking).requires_grad_()),
            "^determinism: .* gradient",
        ),
        (_Broken(summaries=_mean_of_the_sequence), "^documents: what document 0 holds changes"),
        (
            example_selector("query_block.py:LOOKAHEAD"),
            r"^causality: what token \d+ and those after it hold",
        ),
    ],
)
def test_every_rule_can_be_broken(selector: Any, rule: str) -> None:
    with pytest.raises(SelectorError, match=rule):
        check_selector(selector)
