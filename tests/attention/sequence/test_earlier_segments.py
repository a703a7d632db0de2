# SPDX-License-Identifier: Apache-2.0
"""Attention by segments, backward in reverse order, against attention over the whole sequence."""

import random

import pytest
import torch
from attention.cases import assert_as_good_as_plain, assert_exact, make_case, ranked
from attention.sequence.segmented import (
    BLOCK,
    BLOCKS,
    BUDGETS,
    CU_SEQLENS,
    EVERY_SELECTOR,
    Segmented,
    case_of,
    read,
    whole_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.sequence.earlier_segments import (
    EarlierSegments,
    segment_slice,
)


def _cuts(segments: int, seed: int) -> list[int]:
    return [0, *sorted(random.Random(seed).sample(range(1, BLOCKS), segments - 1))]


@pytest.mark.parametrize("name", EVERY_SELECTOR)
@settings(max_examples=8)
@given(segments=st.integers(1, 8), seed=st.integers(0, 999), kv_heads=st.sampled_from([1, 2, 4]))
def test_segments_are_the_whole(name: str, segments: int, seed: int, kv_heads: int) -> None:
    """Lists bit by bit, coverage of all tokens, outputs and gradients to float64's rounding."""
    case, selector = case_of(kv_heads), EVERY_SELECTOR[name]
    run = Segmented(case, selector, _cuts(segments, seed))
    found = run.run()
    whole, curves_SK = whole_of(case, selector, torch.float64)
    lists = [each for selection in run.selections.values() for each in read(selection)]
    assert lists == read(whole.selection)
    torch.testing.assert_close(run.curves[segments - 1], curves_SK)
    exact = whole.ours("reference", torch.float64)
    assert_exact(found, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["token-query-head", "previous-block"])
def test_segments_lose_no_precision(name: str, dtype: torch.dtype) -> None:
    case = make_case(CU_SEQLENS, BUDGETS, block=BLOCK, head_dim=8, kind=name, dtype=dtype)
    found = Segmented(case, EVERY_SELECTOR[name], _cuts(8, 1), dtype).run()
    assert_as_good_as_plain(case, found, dtype, case.plain(torch.float64))


@pytest.mark.parametrize("name", ["token-kv-head", "vertical-slash"])
def test_recomputed_segments_repeat_every_bit(name: str) -> None:
    first, second = (
        Segmented(
            case_of(), EVERY_SELECTOR[name], _cuts(5, 2), torch.float32, recompute=recompute
        ).run()
        for recompute in (False, True)
    )
    assert all(map(torch.equal, first, second))


def test_coverage_of_a_segment_is_that_of_the_tokens_so_far() -> None:
    """A document's curve is the one of its tokens so far, as if it ended there."""
    case, selector = case_of(), EVERY_SELECTOR["token-query-head"]
    run = Segmented(case, selector, [0, 7, 13])
    run.run()
    end = 51 + 4 * BLOCK
    layout = packed_layout([*CU_SEQLENS[:5], end], BLOCK, "cpu")
    qk = [x[:end].double() for x in (case.q_THD, case.k_TGD)]
    ranking = ranked(selector, qk, layout, max_budget=max(BUDGETS), observe=True)
    torch.testing.assert_close(run.curves[1], selector.coverage(ranking))


def test_nothing_is_kept_after_the_last_backward() -> None:
    run = Segmented(case_of(), EVERY_SELECTOR["previous-block"], [0, 5, 9])
    for segment in range(3):
        run.forward(segment)
    assert [len(kept) for kept in vars(run.segments).values() if kept] == [3, 3, 3]
    run.backward(2)
    assert [len(kept) for kept in vars(run.segments).values() if isinstance(kept, list)] == [2] * 3
    run.backward(1)
    run.backward(0)
    assert not any(vars(run.segments).values())


@pytest.mark.parametrize("recomputed", [True, False])
def test_what_a_recomputed_layer_projected_is_not_kept(recomputed: bool) -> None:
    """Keys and values are views of it. Where a graph holds it anyway, nothing is copied."""
    held, segments = segment_slice(CU_SEQLENS, [0, 5], 0, block_size=BLOCK), EarlierSegments()
    projected = torch.ones(len(held.tokens_T), 4, 8, requires_grad=not recomputed)
    k_TGD, v_TGF = projected.split(2, dim=1)
    list(segments.parts(k_TGD, v_TGF, None, held))  # type: ignore[arg-type]
    (kept,) = vars(segments)["_keys_and_values"]
    shares = [x.untyped_storage().data_ptr() == projected.data_ptr() for x in kept]
    assert shares == [not recomputed] * 2


def test_segments_out_of_order_are_refused() -> None:
    run = Segmented(case_of(), EVERY_SELECTOR["previous-block"], [0, 5, 9])
    with pytest.raises(ValueError, match="forward of segment 1 before that of segment 0"):
        run.forward(1)
    for segment in range(3):
        run.forward(segment)
    with pytest.raises(ValueError, match="backward of segment 0 before that of segment 2"):
        run.backward(0)


@pytest.mark.parametrize("segment_starts_blocks", [[1, 5], [0, 5, 5], [0, 29]])
def test_cuts_that_leave_a_segment_without_blocks_are_refused(
    segment_starts_blocks: list[int],
) -> None:
    with pytest.raises(ValueError, match="must begin at 0, and increase to less than"):
        segment_slice(CU_SEQLENS, segment_starts_blocks, 0, block_size=BLOCK)
