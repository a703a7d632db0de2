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
from attention.cases import SCALE, saved
from fake_cuda import CUDA, NoTraffic, fake_cuda
from flash_attn.cute import interface, tile_scheduler

from sparsebalance_megatron.attention.api import dense_kernel
from sparsebalance_megatron.attention.kernels import fa4
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


def attend(
    lengths: list[int], heads: tuple[int, int], head_dims: tuple[int, int], causal: bool
) -> None:
    """``causal``: queries and keys are of the same tokens; else all are read."""
    layout = layout_of(lengths)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "device": CUDA}
    (head_dim, value_dim), tokens = head_dims, sum(lengths)
    q = torch.empty(tokens, heads[0], head_dim, **how)
    k, v = (torch.empty(tokens, heads[1], size, **how) for size in head_dims)
    assert dense_kernel(q, v, layout, "auto") == ("fa4", None)
    lists = Selection.of_documents(layout, None if causal else layout_of(lengths))
    for each in (layout, lists.kv_layout):
        each.bounds_S1  # noqa: B018
    with torch.no_grad(), NoTraffic():
        out, lse = fa4.forward(q, k, v, lists, softmax_scale=SCALE)
        assert (out.shape, out.dtype) == ((tokens, heads[0], value_dim), q.dtype)
        assert (lse.shape, lse.dtype) == (q.shape[:2], torch.float32)
        gradients = fa4.backward(torch.empty_like(out), saved(q, k, v, out, lse, lists))
    assert [(x.shape, x.dtype) for x in gradients] == [(x.shape, x.dtype) for x in (q, k, v)]


def compiled() -> int:
    functions = interface._flash_attn_fwd, interface._flash_attn_bwd
    return sum(len(function.compile_cache.cache) for function in functions)


with fake_cuda():
    capability = divmod(int(os.environ["FLASH_ATTENTION_ARCH"].removeprefix("sm_")), 10)
    torch.cuda.get_device_capability = lambda *_: capability
    for heads, head_dims, causal in (
        ((16, 2), (128, 128), True),
        ((16, 2), (128, 128), False),
        ((4, 4), (64, 64), True),
    ):
        before = compiled()
        attend([3000, 5192], heads, head_dims, causal)
        first = compiled()
        assert first - before == 2, (before, first)
        attend([1, 700, 300, 65_536], heads, head_dims, causal)
        assert compiled() == first
print("compiled", compiled())
