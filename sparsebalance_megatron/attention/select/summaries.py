# SPDX-License-Identifier: Apache-2.0
"""Summaries of blocks, which let a selector score blocks that another rank holds; who computes."""

import importlib.util
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton import is_interpreted
from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout
from sparsebalance_megatron.config import Router

_COPIED_ELEMENTS = 1 << 21
"""Elements that are widened or padded at once: 8 MiB in float32."""


class SharedSummaries(Protocol):
    """Summaries that ranks which share a sequence can gather."""

    def parts(self, layout: PackedLayout) -> list[Tensor]:
        """Tensors with one entry per block, of shapes that do not depend on the sequence."""

    def joined(self, parts: Sequence[Tensor], layout: PackedLayout) -> Self:
        """Summaries of another sequence, from the parts of all of its blocks in their order."""


@dataclass(frozen=True, kw_only=True, eq=False)
class BlockSummaries:
    """One entry per block; ranks that hold parts of a sequence gather them.

    Attributes:
        keys_NGD: the mean key, in the dtype of the keys.
        queries_NCD: float32, the query that speaks for a block; None where tokens select.
    """

    keys_NGD: Tensor
    queries_NCD: Tensor | None

    def parts(self, layout: PackedLayout) -> list[Tensor]:
        return [self.keys_NGD] + ([] if self.queries_NCD is None else [self.queries_NCD])

    def joined(self, parts: Sequence[Tensor], layout: PackedLayout) -> "BlockSummaries":
        keys_NGD, *queries = parts
        return BlockSummaries(keys_NGD=keys_NGD, queries_NCD=queries[0] if queries else None)


def block_means(x_THD: Tensor, layout: PackedLayout, router: Router = "torch") -> Tensor:
    """Means over the tokens of every block, [N, H, D]: float32, or float64 for float64."""
    if takes_triton(router, x_THD.device):
        from sparsebalance_megatron.attention.select.router_kernels import pooled_means

        return pooled_means(x_THD, layout)
    wide = torch.promote_types(x_THD.dtype, torch.float32)
    sum_NHD = x_THD.new_empty(layout.blocks, *x_THD.shape[1:], dtype=wide)
    at_once = max(1, _COPIED_ELEMENTS // (layout.block_tokens * x_THD[0].numel()))
    for first in range(0, layout.blocks, at_once):
        some = slice(first, min(first + at_once, layout.blocks))
        torch.sum(layout.to_blocks(x_THD, some), 1, dtype=wide, out=sum_NHD[some])
    return sum_NHD / layout.length_N[:, None, None]


def check_heads(
    step: str, q_THD: Tensor, tokens: int, keys: Tensor, entries: int, max_budget: int = 1
) -> None:
    """Refuse queries and keys, or summaries of keys, that fit neither one another nor their
    layouts, which have so many ``tokens`` and ``entries``."""
    lengths = q_THD.shape[0], keys.shape[0]
    fits = q_THD.ndim == keys.ndim == 3 and lengths == (tokens, entries)
    if not fits or q_THD.shape[1] % keys.shape[1] or q_THD.shape[2] != keys.shape[2]:
        raise ValueError(
            f"{step}: query {tuple(q_THD.shape)} must be [{tokens} tokens as in its layout, a "
            f"multiple of the KV heads, head dim], keys {tuple(keys.shape)} [{entries} entries of "
            "theirs, KV heads, the same head dim]"
        )
    if max_budget < 1:
        raise ValueError(f"{step}: max_budget {max_budget}: must be at least 1 block")


MOST_BLOCKS = 1024
"""Blocks of a document whose sort was compiled and seen to stay in registers."""


def ranks_in_triton(
    router: Router, device: torch.device, layouts: LayoutPair, *, softmax_scale: float
) -> bool:
    """Whether rows of scores are ranked by the kernel.

    "auto" takes it wherever it serves on CUDA, and warns where it does not; "torch" never takes it.
    Interpreted kernels serve on the CPU, where only "triton" takes them; where it does not serve,
    that is a ValueError.
    """
    obstacle, blocks = None, layouts.kv_layout.max_blocks
    if blocks > MOST_BLOCKS:
        most = f"ranks documents of up to {MOST_BLOCKS} blocks"
        obstacle = f"{most}, not {blocks}: take larger blocks"
    elif not softmax_scale > 0.0:
        obstacle = f"needs a positive softmax scale, not {softmax_scale}"
    return takes_triton(router, device, obstacle)


def takes_triton(router: Router, device: torch.device, obstacle: str | None = None) -> bool:
    """Whether kernels serve; see :func:`ranks_in_triton`. Means over blocks have no obstacle."""
    if router == "torch" or (router == "auto" and device.type != "cuda"):
        return False
    obstacle = _obstacle_of_device(device) or obstacle
    if obstacle is None:
        return True
    if router == "triton":
        raise ValueError(f'router "triton" {obstacle}; or use "torch" or "auto"')
    warnings.warn(f'router "auto" takes "torch" on CUDA: "triton" {obstacle}', stacklevel=3)
    return False


def _obstacle_of_device(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "needs the package triton, which is not installed"
    if device.type == "cuda" or is_interpreted():
        return None
    return f"needs CUDA, and the keys lie on {device}"
