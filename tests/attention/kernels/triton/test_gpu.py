# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: bfloat16, long sequences, no recompilation, no synchronisation."""

import pytest
import torch
from attention.cases import assert_as_good_as_plain, lists_within, make_case, selected
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.selection import Selection

triton = pytest.importorskip("triton")
from sparsebalance_megatron.attention.kernels.triton import (  # noqa: E402
    device_functions,
    key_block_kernel,
    query_block_kernel,
    token_kernels,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted"),
]

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 128
KERNELS = (
    query_block_kernel._query_block_kernel,
    key_block_kernel._key_block_kernel,
    device_functions._add_parts_kernel,
    key_block_kernel._column_gradient_kernel,
    key_block_kernel._column_sum_kernel,
    token_kernels._reader_kernel,
    token_kernels._delta_kernel,
    token_kernels._token_key_kernel,
)
KINDS = ["previous-block", "token-kv-head", "token-query-head", "vertical-slash"]


def _inputs(tokens: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(
            tokens, n, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def _random_selection(layout: PackedLayout, budgets: list[int], kind: str) -> Selection:
    generator = torch.Generator("cuda").manual_seed(1)
    q_THD, k_TGD = (
        torch.randn(layout.tokens, heads, 16, generator=generator, device="cuda")
        for heads in (HEADS, KV_HEADS)
    )
    return selected(kind, q_THD, k_TGD, layout, budgets)


def _attend(inputs: list[Tensor], selection: Selection) -> tuple[Tensor, ...]:
    out_THD, lse_TH = block_sparse_attention(
        *inputs, selection, softmax_scale=HEAD_DIM**-0.5, implementation="triton"
    )
    gradients = torch.autograd.grad(out_THD, inputs, torch.ones_like(out_THD))
    return out_THD.detach(), lse_TH, *gradients


@pytest.mark.parametrize("kind", KINDS)
def test_results_repeat_bit_by_bit_with_a_block_that_all_read(kind: str) -> None:
    inputs = _inputs(32768)
    layout = packed_layout([0, 100, 32768], 128, "cuda")
    selection = _random_selection(layout, [1, 16], kind)
    numbers_Q = layout.block_T if selection.by_token else layout.number_N
    # Where the block is listed already, it stays listed once. First tokens are columns of all.
    lists_QCK = selection.indices_QCK
    lacking_QC = (lists_QCK != 1).all(-1) & (numbers_Q > 2)[:, None]
    if selection.columns is None:
        lists_QCK[..., 1] = lists_QCK[..., 1].masked_fill(lacking_QC, 1)
    first = _attend(inputs, selection)
    for _ in range(3):
        again = _attend(inputs, selection)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_other_budgets_and_lengths_compile_nothing(kind: str) -> None:
    def compiled() -> int:
        return sum(len(caches[0]) for kernel in KERNELS for caches in kernel.device_caches.values())

    def run(cu_seqlens: list[int], budgets: list[int]) -> None:
        layout = packed_layout(cu_seqlens, 128, "cuda")
        selection = _random_selection(layout, budgets, kind)
        _attend(_inputs(cu_seqlens[-1]), selection)

    run([0, 5000], [4])
    # At so small a budget nobody has columns, and two kernels are compiled without.
    run([0, 5000], [2])
    before = compiled()
    assert before > 0
    for cu_seqlens, budgets in (([0, 128], [1]), ([0, 1, 4096], [1, 16]), ([0, 9999], [31])):
        run(cu_seqlens, budgets)
    assert compiled() == before


@pytest.mark.parametrize("kind", KINDS)
def test_neither_pass_waits_for_the_device(kind: str) -> None:
    """Ranking, coverage and the cut included."""
    inputs, selector = _inputs(8192), selector_named(kind)
    layout, budgets_S = packed_layout([0, 3000, 8192], 128, "cuda"), torch.tensor([4, 9]).cuda()

    def layer() -> None:
        q_THD, k_TGD, _ = inputs
        how = {"softmax_scale": HEAD_DIM**-0.5, "max_budget": 9, "observe": True}
        ranking = rank_sequence(selector, q_THD, k_TGD, layout, **how)
        selector.coverage(ranking)
        _attend(inputs, selector.select(ranking, budgets_S))

    layer()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _last_blocks(layout: PackedLayout, heads: int, *, by_token: bool) -> Selection:
    """Lists, in 16 bits, of the own block and up to three before it."""
    block_Q = layout.block_T if by_token else layout.number_N
    counts_Q = (layout.index_N[block_Q] + 1).clamp(max=4).int()
    indices_QK = (block_Q[:, None] - torch.arange(4, device="cuda")).short()
    return lists_within(
        layout,
        indices_QK[:, None].expand(-1, heads, -1).contiguous(),
        counts_Q[:, None].expand(-1, heads).contiguous(),
        by_token=by_token,
    )


@pytest.mark.parametrize("by_token", [False, True])
def test_rows_beyond_two_billion_elements(by_token: bool) -> None:
    """The end of a sequence whose addresses need 64 bits, against one that holds nothing else.

    A number of a block fits in 16 bits, and its first token does not.
    """
    tokens, tail, heads = 150_000, 512, 128
    assert tokens * heads * HEAD_DIM > 2**31
    inputs = _inputs(tokens, heads, heads)
    layout = packed_layout([0, tokens - tail, tokens], 128, "cuda")
    whole = _attend(inputs, _last_blocks(layout, heads, by_token=by_token))
    alone = [x.detach()[-tail:].clone().requires_grad_() for x in inputs]
    layout = packed_layout([0, tail], 128, "cuda")
    part = _attend(alone, _last_blocks(layout, heads, by_token=by_token))
    for a, b in zip(whole, part, strict=True):
        torch.testing.assert_close(a[-tail:], b)


@pytest.mark.parametrize("kind", ["token-kv-head", "token-query-head"])
def test_tokens_on_a_gpu(kind: str) -> None:
    torch.use_deterministic_algorithms(False)
    case = make_case([0, 700, 1500], [3, 2], block=128, head_dim=64, kind=kind, device="cuda")
    ours = case.ours("tokens", torch.float32)
    assert_as_good_as_plain(case, ours, torch.float32, case.plain(torch.float64))
