# SPDX-License-Identifier: Apache-2.0
"""What only a GPU can show: bfloat16, long rows, no recompilation, no synchronisation."""

from __future__ import annotations

import pytest
import torch
from attention.cases import assert_as_good_as_plain, make_case, selection_by_scores
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.selection import Selection

triton = pytest.importorskip("triton")
from sparsebalance_megatron.attention.impl.triton import backward_kernels, forward_kernel  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(triton.knobs.runtime.interpret, reason="kernels are interpreted"),
]

HEADS, KV_HEADS, HEAD_DIM = 16, 2, 128
KERNELS = (
    forward_kernel._forward_kernel,
    backward_kernels._query_gradient_kernel,
    backward_kernels._key_gradient_kernel,
    backward_kernels._add_parts_kernel,
)


def _inputs(tokens: int, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    return [
        torch.randn(
            tokens, n, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16
        ).requires_grad_()
        for n in (heads, kv_heads, kv_heads)
    ]


def _random_selection(layout: PackedLayout, budgets: list[int], kv_heads: int) -> Selection:
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (layout.blocks, kv_heads, layout.max_blocks)
    scores_NGJ = torch.randn(shape, generator=generator, device="cuda")
    return selection_by_scores(scores_NGJ, layout, budgets)


def _attend(inputs: list[Tensor], selection: Selection) -> tuple[Tensor, ...]:
    out_THD, lse_TH = block_sparse_attention(
        *inputs, selection, softmax_scale=HEAD_DIM**-0.5, implementation="triton"
    )
    gradients = torch.autograd.grad(out_THD, inputs, torch.ones_like(out_THD))
    return out_THD.detach(), lse_TH, *gradients


@pytest.mark.parametrize("block", [64, 128, 256])
@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_dtypes_at_full_tiles(block: int, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(
        [0, 700, 701, 1500],
        [3, 1, 2],
        block=block,
        head_dim=head_dim,
        heads=8,
        kv_heads=2,
        dtype=dtype,
        device="cuda",
    )
    assert_as_good_as_plain(case, case.ours("triton", dtype), dtype, case.plain(torch.float64))


def test_auto_takes_the_kernels() -> None:
    case = make_case([0, 300], [2], block=64, head_dim=64, dtype=torch.bfloat16, device="cuda")
    pairs = zip(case.ours("auto", torch.bfloat16), case.ours("triton", torch.bfloat16), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_32_blocks_of_256_are_dense_up_to_8192_tokens() -> None:
    q, k, v = _inputs(8192)
    layout = packed_layout([0, 8192], 256, "cuda")
    out, _, *gradients = _attend([q, k, v], _random_selection(layout, [32], KV_HEADS))
    wide = [x.detach().double().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    low = [x.detach().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    results = []
    for leaves in (wide, low):
        dense = scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
        grads = torch.autograd.grad(dense, leaves, torch.ones_like(dense))
        results.append([x[0].transpose(0, 1).double() for x in (dense.detach(), *grads)])
    for ours, exact, plain in zip((out, *gradients), *results, strict=True):
        allowed = 2 * (plain - exact).abs().max() + 1e-3 * exact.abs().max()
        assert (ours.double() - exact).abs().max() <= allowed


def test_results_repeat_bit_by_bit_with_a_block_that_all_read() -> None:
    inputs = _inputs(32768)
    layout = packed_layout([0, 100, 32768], 128, "cuda")
    selection = _random_selection(layout, [1, 16], KV_HEADS)
    selection.indices_QCK[3:, :, 1] = 1
    first = _attend(inputs, selection)
    for _ in range(3):
        again = _attend(inputs, selection)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_other_budgets_and_lengths_compile_nothing() -> None:
    def compiled() -> int:
        return sum(len(caches[0]) for kernel in KERNELS for caches in kernel.device_caches.values())

    def run(cu_seqlens: list[int], budgets: list[int]) -> None:
        layout = packed_layout(cu_seqlens, 128, "cuda")
        _attend(_inputs(cu_seqlens[-1]), _random_selection(layout, budgets, KV_HEADS))

    run([0, 5000], [4])
    before = compiled()
    assert before > 0
    for cu_seqlens, budgets in (([0, 128], [1]), ([0, 1, 4096], [1, 16]), ([0, 9999], [31])):
        run(cu_seqlens, budgets)
    assert compiled() == before


def test_neither_pass_waits_for_the_device() -> None:
    inputs = _inputs(8192)
    layout = packed_layout([0, 3000, 8192], 128, "cuda")
    selection = _random_selection(layout, [4, 9], KV_HEADS)
    _attend(inputs, selection)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _attend(inputs, selection)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_rows_beyond_two_billion_elements() -> None:
    """The end of a row whose addresses need 64 bits, against a row that holds nothing else."""
    tokens, tail, heads = 150_000, 512, 128
    assert tokens * heads * HEAD_DIM > 2**31
    inputs = _inputs(tokens, heads, heads)
    whole = _attend(
        inputs,
        _random_selection(packed_layout([0, tokens - tail, tokens], 128, "cuda"), [1, 9], heads),
    )
    alone = [x.detach()[-tail:].clone().requires_grad_() for x in inputs]
    part = _attend(alone, _random_selection(packed_layout([0, tail], 128, "cuda"), [9], heads))
    for a, b in zip(whole, part, strict=True):
        torch.testing.assert_close(a[-tail:], b)


@pytest.mark.parametrize("granularity", ["token-kv-head", "token-query-head"])
def test_selections_by_token(granularity: str) -> None:
    torch.use_deterministic_algorithms(False)
    case = make_case(
        [0, 700, 1500], [3, 2], block=128, head_dim=64, granularity=granularity, device="cuda"
    )
    ours = case.ours("tokens", torch.float32)
    assert_as_good_as_plain(case, ours, torch.float32, case.plain(torch.float64))
