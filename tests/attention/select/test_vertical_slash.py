# SPDX-License-Identifier: Apache-2.0
"""Vertical-slash lists and coverage against their definition, and what they may never do.

The public code of MTraining has faults that are named below, each beside the test that it would
fail (microsoft/MInference, branch wenxuan/mtrain at f74982d).
"""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention.cases import drawn, listed, ranked
from hypothesis import given
from hypothesis import strategies as st
from oracles import vertical_slash as oracle
from torch import Tensor

from sparsebalance_megatron.attention.layout import LayoutPair, packed_layout
from sparsebalance_megatron.attention.select import vertical_slash
from sparsebalance_megatron.attention.select.ranking import Ranking, column_blocks
from sparsebalance_megatron.attention.select.vertical_slash import VERTICAL_SLASH
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.cost.work_model import work_model_named

BLOCK, SCALE = 8, 0.8
SELECTOR, WORK = VERTICAL_SLASH, work_model_named("vertical-slash")
CU_SEQLENS = [0, 21, 120, 157]


def _ranking(
    inputs: Sequence[Tensor],
    cu_seqlens: list[int],
    *,
    block_size: int = BLOCK,
    **options: Any,
) -> Ranking:
    layout = packed_layout(cu_seqlens, block_size, "cpu")
    return ranked(SELECTOR, inputs, layout, softmax_scale=SCALE, **options)


def _choices(selection: Selection) -> dict[tuple[int, int], oracle.Choice]:
    blocks, columns = listed(selection.indices_QCK, selection.counts_QC), selection.columns
    tokens = listed(columns.tokens_NGK, columns.counts_NG) if columns else {}
    return {
        place: oracle.Choice(blocks=numbers, columns=tokens.get(place, []))
        for place, numbers in blocks.items()
    }


def _same_lists(a: Selection, b: Selection) -> bool:
    return _choices(a) == _choices(b)


@pytest.mark.parametrize(
    ("cu_seqlens", "kv_heads"), [(CU_SEQLENS, 2), ([0, 1, 2, 51, 140], 1), ([0, 96], 4)]
)
def test_lists_and_coverage_are_the_definitions(cu_seqlens: list[int], kv_heads: int) -> None:
    """At every budget. 21, 99 and 37 tokens in blocks of 8: last blocks are short.

    Faults 3, 7 and 9: budgets capped by the tokens at hand, no packed sequences, and one probe at
    the end of all.
    """
    inputs = drawn(cu_seqlens[-1], 4, kv_heads)
    ranking = _ranking(inputs, cu_seqlens, observe=True)
    orders = oracle.ranked(*inputs, cu_seqlens, BLOCK, SCALE)
    seen = oracle.seen_by_blocks(*inputs, cu_seqlens, BLOCK, SCALE)
    curves_SK = SELECTOR.coverage(ranking)
    for budget in range(1, curves_SK.shape[1] + 1):
        expected = {
            key: oracle.cut(order, budget, cu_seqlens, BLOCK) for key, order in orders.items()
        }
        selection = SELECTOR.select(ranking, torch.full((len(cu_seqlens) - 1,), budget))
        assert _choices(selection) == expected
        covered = oracle.coverage(seen, cu_seqlens, BLOCK, expected)
        torch.testing.assert_close(
            curves_SK[:, budget - 1], torch.tensor(covered), atol=1e-6, rtol=0
        )
    assert curves_SK.dtype == torch.float32
    assert (curves_SK.diff(dim=1) >= 0).all()
    assert (curves_SK[:, -1] == 1.0).all()


@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=4),
    group=st.sampled_from([1, 2, 4]),
    block_size=st.sampled_from([1, 2, 8, 16]),
    budgets=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    chunk_elements=st.sampled_from([1, 1 << 12, 1 << 21]),
    seed=st.integers(0, 1000),
)
def test_a_budget_buys_the_keys_of_so_many_blocks_and_no_key_twice(
    lengths: list[int],
    group: int,
    block_size: int,
    budgets: tuple[int, int],
    chunk_elements: int,
    seed: int,
) -> None:
    """All keys in the past of the same document, as many as the work model says, and at a larger
    budget all of them again, whatever is computed at once and whatever others' budgets are.

    Fault 2: where the columns fill their capacity, the last one was lost, or one more read. Fault
    4: with the diagonal left out, columns of a query's own block had no causal mask.
    """
    cu_seqlens = [0, *itertools.accumulate(lengths)]
    layout = packed_layout(cu_seqlens, block_size, "cpu")
    inputs = drawn(cu_seqlens[-1], 4, 4 // group, seed=seed)
    low, high = sorted(budgets)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vertical_slash, "SCORES_AT_ONCE", chunk_elements)
        wide = _ranking(inputs, cu_seqlens, block_size=block_size, max_budget=high)
        narrow = _ranking(inputs, cu_seqlens, block_size=block_size, max_budget=low)
    found = [SELECTOR.select(wide, torch.full((len(lengths),), budget)) for budget in (low, high)]
    assert _same_lists(SELECTOR.select(narrow, torch.full((len(lengths),), low)), found[0])
    read: list[set[int]] = []
    for selection, budget in zip(found, (low, high), strict=True):
        pairs = 0.0
        for (row, head), choice in _choices(selection).items():
            document, own = int(layout.document_N[row]), int(layout.start_N[row])
            begin = cu_seqlens[document]
            assert choice.blocks[0] == row
            past = [
                token
                for number in choice.blocks[1:]
                for token in range(
                    int(layout.start_N[number]), int(layout.start_N[number]) + block_size
                )
            ] + choice.columns
            assert all(begin <= token < own for token in past)
            assert len(past) == len(set(past))
            visible = int(layout.index_N[row]) + 1
            assert len(past) == block_size * (min(budget, visible) - 1)
            tokens = int(layout.length_N[row])
            pairs += tokens * (len(past) + tokens) / block_size**2
            read.append({*past, head * cu_seqlens[-1]})
    half = len(read) // 2
    for small, large in zip(read[:half], read[half:], strict=True):
        assert small <= large
    predicted = WORK.attended_pairs(torch.tensor(lengths) / block_size, high)
    assert pairs / (4 // group) == pytest.approx(predicted.sum(), rel=1e-6)


def test_the_work_model_knows_the_probes_and_the_columns() -> None:
    entries = [
        WORK.list_entries_per_token(heads=8, groups=2, block_size=64, budget_blocks=budget)
        for budget in range(99)
    ]
    assert entries == [2 * (budget / 64 + column_blocks(budget)) for budget in range(99)]
    assert WORK.scores_per_visible_pair(3, 1, 64) == vertical_slash._PROBE_TOKENS * 3 * 64


def test_nothing_falls_back_silently() -> None:
    """Fault 6: without a process group the ring ops ran dense attention. Queries of other
    sequences and wrong arguments, are errors."""
    inputs, layout = drawn(157, 4, 2), packed_layout(CU_SEQLENS, BLOCK, "cpu")
    elsewhere = LayoutPair.of_blocks(packed_layout([0, 8, 16], BLOCK, "cpu"), layout, [0, 1])
    options = {"softmax_scale": SCALE, "max_budget": 3, "observe": False}
    keys = SELECTOR.summaries(*inputs, layout)
    with pytest.raises(ValueError, match="16 tokens as in its layout"):
        SELECTOR.rank(inputs[0], keys, elsewhere, **options)
    with pytest.raises(ValueError, match="157 tokens as in its layout"):
        SELECTOR.rank(inputs[0][:9], keys, LayoutPair.within(layout), **options)


def test_coverage_between_measured_budgets_lies_on_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = drawn(20 * BLOCK, 4, 2)
    exact = SELECTOR.coverage(_ranking(inputs, [0, 20 * BLOCK], observe=True))[0]
    monkeypatch.setattr(vertical_slash, "_EXACT_BUDGETS", 8)
    budgets = vertical_slash.observed_budgets(20)
    assert budgets == (*range(1, 9), 10, 12, 15, 18, 20)
    between = SELECTOR.coverage(_ranking(inputs, [0, 20 * BLOCK], observe=True))[0]
    for budget in range(1, 21):
        low = max(one for one in budgets if one <= budget)
        high = min(one for one in budgets if one >= budget)
        share = (budget - low) / max(1, high - low)
        expected = torch.lerp(exact[low - 1], exact[high - 1], share)
        torch.testing.assert_close(between[budget - 1], expected, atol=1e-6, rtol=0)
