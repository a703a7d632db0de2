# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention with their selection, run forward and backward; the error allowed.

Shape legend: T tokens of the packed row, H query heads, G KV heads, D head dim, R rows and C heads
that select, K width of lists.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from oracles import attention as oracle
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.attention.selectors.block_topk import router_scores, select_blocks

SCALE = 0.4
NAMES = ("out", "lse", "dq", "dk", "dv")


@dataclasses.dataclass(frozen=True)
class Case:
    """Tensors lie on the CPU; implementations run on ``device``."""

    q_THD: Tensor
    k_TGD: Tensor
    v_TGD: Tensor
    dout_THD: Tensor
    budgets: list[int]
    selection: Selection
    device: str = "cpu"

    @functools.cached_property
    def mask_HTT(self) -> Tensor:
        """What the router's definition lets every query read."""
        layout, granularity = self.selection.layout, self.selection.granularity
        lists = oracle.moba_lists(
            self.q_THD,
            self.k_TGD,
            list(layout.cu_seqlens),
            layout.block_size,
            self.budgets,
            granularity,
        )
        return self._mask(lists)

    @functools.cached_property
    def listed_HTT(self) -> Tensor:
        """What the selection's own lists let every query read."""
        rows, heads, _ = self.selection.indices_RCK.shape
        lists = {
            (row, head): self.selection.indices_RCK[
                row, head, : int(self.selection.counts_RC[row, head])
            ].tolist()
            for row in range(rows)
            for head in range(heads)
        }
        return self._mask(lists)

    def _mask(self, lists: oracle.Lists) -> Tensor:
        layout = self.selection.layout
        return oracle.token_mask(
            lists,
            self.q_THD.shape[1],
            self.selection.indices_RCK.shape[1],
            list(layout.cu_seqlens),
            layout.block_size,
            self.selection.granularity,
        )

    def run(
        self, function: Callable[..., Any], dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[Tensor, ...]:
        """out, lse, dq, dk, dv of ``function(q, k, v)`` in ``dtype``."""
        leaves = [
            x.to(device, dtype, copy=True).requires_grad_()
            for x in (self.q_THD, self.k_TGD, self.v_TGD)
        ]
        out_THD, lse_TH = function(*leaves)
        # Not autograd.grad, which reentrant checkpoints refuse.
        out_THD.backward(self.dout_THD.to(device, dtype))
        results = out_THD.detach(), lse_TH.detach(), *(leaf.grad for leaf in leaves)
        return tuple(x.cpu() for x in results)

    def ours(self, implementation: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
        selection = on_device(self.selection, self.device)
        return self.run(
            lambda q, k, v: block_sparse_attention(
                q, k, v, selection, softmax_scale=SCALE, implementation=implementation
            ),
            dtype,
            self.device,
        )

    def exact(self) -> tuple[Tensor, ...]:
        """By loops over single queries: for few tokens."""
        return self.run(
            lambda q, k, v: oracle.loop_attention(q, k, v, self.mask_HTT, SCALE), torch.float64
        )

    def plain(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return self.run(
            lambda q, k, v: oracle.plain_attention(q, k, v, self.listed_HTT, SCALE), dtype
        )


def make_case(
    cu_seqlens: list[int],
    budgets: list[int],
    *,
    block: int,
    head_dim: int,
    granularity: str = "query-block",
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    generator = torch.Generator().manual_seed(cu_seqlens[-1] + kv_heads)
    tokens = cu_seqlens[-1]
    shapes = ((heads,), (kv_heads,), (kv_heads,), (heads,))
    q, k, v, dout = (
        torch.randn(tokens, *shape, head_dim, generator=generator).to(dtype) for shape in shapes
    )
    layout = packed_layout(cu_seqlens, block, "cpu")
    scores = router_scores(q, k, layout, granularity=granularity, softmax_scale=SCALE)
    selection = select_blocks(scores, torch.tensor(budgets), max_budget=max(budgets))
    return Case(q, k, v, dout, budgets, selection, device)


def with_lists(case: Case, indices_RCK: Tensor, counts_RC: Tensor) -> Case:
    changed = dataclasses.replace(case.selection, indices_RCK=indices_RCK, counts_RC=counts_RC)
    return dataclasses.replace(case, selection=changed)


def on_device(selection: Selection, device: str) -> Selection:
    if device == "cpu":
        return selection
    layout = selection.layout
    return dataclasses.replace(
        selection,
        indices_RCK=selection.indices_RCK.to(device),
        counts_RC=selection.counts_RC.to(device),
        layout=packed_layout(layout.cu_seqlens, layout.block_size, device),
    )


def assert_as_good_as_plain(
    case: Case, ours: tuple[Tensor, ...], dtype: torch.dtype, exact: tuple[Tensor, ...]
) -> None:
    """At most twice the error of plain torch in the same precision, and a few roundings.

    exp turns the absolute rounding error of a score into a relative error of its probability, so
    the roundings grow with the largest score.
    """
    k_THD = case.k_TGD.repeat_interleave(case.q_THD.shape[1] // case.k_TGD.shape[1], 1)
    largest_score = float(torch.einsum("qhd,khd->hqk", case.q_THD, k_THD).abs().max()) * SCALE
    rounding = 4 * torch.finfo(torch.float32).eps * max(1.0, largest_score)
    for name, a, b, c in zip(NAMES, ours, case.plain(dtype), exact, strict=True):
        error = (a.double() - c).abs().max()
        allowed = 2 * (b.double() - c).abs().max() + rounding * c.abs().max()
        assert error <= allowed, f"{name}: error {error:.2e}, allowed {allowed:.2e}"
