# SPDX-License-Identifier: Apache-2.0
"""Compiles FlashAttention-4's kernels for a GPU that is not there, through this package's calls.

``FLASH_ATTENTION_ARCH``, ``CUTE_DSL_ARCH`` and ``FLASH_ATTENTION_NUM_SMS`` name the GPU. Other
documents compile nothing; nothing is copied, and the host waits for nothing.
"""

import os
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))

import cutlass.utils
import torch
from attention.cases import inputs_of, lists_within, saved
from fake_cuda import CUDA, NoTraffic, fake_cuda
from flash_attn.cute import interface, tile_scheduler

from sparsebalance_megatron.attention.api import dense_kernel
from sparsebalance_megatron.attention.kernels import fa4, fa4_lists
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.selection import Selection

SMS = int(os.environ["FLASH_ATTENTION_NUM_SMS"])


class Hardware:
    """What schedulers ask a driver for."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def get_device_multiprocessor_count(self) -> int:
        return SMS

    def get_max_active_clusters(self, cluster_size: int = 1, **_: Any) -> int:
        return SMS // cluster_size


cutlass.utils.HardwareInfo = tile_scheduler.HardwareInfo = Hardware


def layout_of(lengths: list[int]) -> PackedLayout:
    return packed_layout([0, *accumulate(lengths)], 256, CUDA)


def documents(
    lengths: list[int], heads: tuple[int, int], head_dim: int, kernel: Any, lists: Selection
) -> None:
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    q = torch.empty(sum(lengths), heads[0], head_dim, **how)
    k, v = (torch.empty(sum(lengths), heads[1], head_dim, **how) for _ in range(2))
    assert kernel is not fa4 or dense_kernel(q, v, lists.query_layout, "auto") == ("fa4", None)
    for each in (lists.query_layout, lists.kv_layout):
        each.bounds_S1  # noqa: B018
    with torch.no_grad(), NoTraffic():
        out, lse = kernel.forward(inputs_of(q, k, v, lists))
        assert (out.shape, out.dtype) == (q.shape, q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
        gradients = kernel.backward(torch.empty_like(out), saved(q, k, v, out, lse, lists))
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


def causal(lengths: list[int], kv_heads: int, budget: int) -> Selection:
    return Selection.of_documents(layout_of(lengths))


def rectangles(lengths: list[int], kv_heads: int, budget: int) -> Selection:
    return Selection.of_documents(layout_of(lengths), layout_of(lengths))


def lists(lengths: list[int], kv_heads: int, budget: int) -> Selection:
    layout = layout_of(lengths)
    indices = torch.empty(layout.blocks, kv_heads, budget, dtype=torch.int16, device=CUDA)
    counts = torch.empty(layout.blocks, kv_heads, dtype=torch.int32, device=CUDA)
    return lists_within(layout, indices, counts, by_token=False)


def compiled() -> int:
    functions = interface._flash_attn_fwd, interface._flash_attn_bwd
    return sum(len(function.compile_cache.cache) for function in functions)


with fake_cuda():
    capability = divmod(int(os.environ["FLASH_ATTENTION_ARCH"].removeprefix("sm_")), 10)
    torch.cuda.get_device_capability = lambda *_: capability
    for heads, head_dim, kernel, made in (
        ((16, 2), 128, fa4, causal),
        ((16, 2), 128, fa4, rectangles),
        ((4, 4), 64, fa4, causal),
        ((16, 2), 128, fa4_lists, lists),
    ):
        before = compiled()
        documents([3000, 5192], heads, head_dim, kernel, made([3000, 5192], heads[1], 8))
        first = compiled()
        assert first - before == 2, (before, first)
        others = [1, 700, 300, 65_536]
        documents(others, heads, head_dim, kernel, made(others, heads[1], 32))
        assert compiled() == first
print("compiled", compiled())
