# SPDX-License-Identifier: Apache-2.0
"""Inputs of attention with their selection, run forward and backward; the error allowed."""

import dataclasses
import functools
import os
import random
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from oracles import attention as oracle
from oracles import vertical_slash as column_oracle
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.kernels import tile_attention
from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.selection import ColumnLists, Selection
from sparsebalance_megatron.selector_registry import BUILT_IN

SCALE = 0.4
_EXAMPLES = Path(__file__).parents[2] / "examples" / "selectors"
NAMES = ("out", "lse", "dq", "dk", "dv")


@functools.cache
def example_selector(name: str = "quest.py:QUEST") -> Any:
    """A selector of examples/selectors, as a package that brings one would."""
    file, _, selector = name.partition(":")
    return runpy.run_path(str(_EXAMPLES / file))[selector]


def inputs_of(q: Tensor, k: Tensor, v: Tensor, lists: Selection) -> Inputs:
    """What a forward pass takes."""
    return Inputs(q_THD=q, k_TGD=k, v_TGF=v, selection=lists, softmax_scale=SCALE)


def saved(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, lists: Selection) -> Saved:
    """What a backward pass takes."""
    tensors = {"q_THD": q, "k_TGD": k, "v_TGF": v, "out_THF": out, "lse_TH": lse}
    return Saved(**tensors, selection=lists, softmax_scale=SCALE)


def listed(lists_QCK: Tensor, counts_QC: Tensor) -> oracle.Lists:
    """What every row and head lists."""
    counts = counts_QC.tolist()
    return {
        (row, head): each[: counts[row][head]]
        for row, heads in enumerate(lists_QCK.tolist())
        for head, each in enumerate(heads)
    }


SELECTORS = {name: selector_named(name) for name in BUILT_IN}
SERVING = [
    (name, implementation)
    for name, selector in SELECTORS.items()
    for implementation in ("tokens" if selector.by_token else "blocks", "reference")
]
"""Selections, and the implementations that serve them on a CPU."""


@dataclasses.dataclass(frozen=True)
class Case:
    """Tensors lie on the CPU; implementations run on ``device``."""

    q_THD: Tensor
    k_TGD: Tensor
    v_TGF: Tensor
    dout_THF: Tensor
    budgets: list[int]
    kind: str
    selection: Selection
    device: str = "cpu"

    @functools.cached_property
    def mask_HTT(self) -> Tensor:
        """What the router's definition lets every query read."""
        layout = self.selection.query_layout
        cut = list(layout.cu_seqlens), layout.block_size
        inputs = self.q_THD, self.k_TGD, *cut
        if not self.kind.startswith("vertical-slash"):
            return self._mask(oracle.moba_lists(*inputs, self.budgets, self.kind))
        ranked = column_oracle.ranked(*inputs, SCALE)
        budgets = [self.budgets[document] for document in layout.document_N.tolist()]
        choices = {
            place: column_oracle.cut(order, budgets[place[0]], *cut)
            for place, order in ranked.items()
        }
        return self._mask(
            {place: choice.blocks for place, choice in choices.items()},
            {place: choice.columns for place, choice in choices.items()},
        )

    @functools.cached_property
    def listed_HTT(self) -> Tensor:
        """What the selection's own lists let every query read."""
        columns = self.selection.columns
        tokens = listed(columns.tokens_NGK, columns.counts_NG) if columns else None
        return self._mask(listed(self.selection.indices_QCK, self.selection.counts_QC), tokens)

    def _mask(self, blocks: oracle.Lists, columns: oracle.Lists | None = None) -> Tensor:
        layout = self.selection.query_layout
        heads = self.q_THD.shape[1], self.selection.indices_QCK.shape[1]
        cut = list(layout.cu_seqlens), layout.block_size
        return oracle.token_mask(blocks, *heads, *cut, self.kind, columns)

    def run(
        self, function: Callable[..., Any], dtype: torch.dtype, device: str = "cpu"
    ) -> tuple[Tensor, ...]:
        """out, lse, dq, dk, dv of ``function(q, k, v)`` in ``dtype``."""
        leaves = [
            x.to(device, dtype, copy=True).requires_grad_()
            for x in (self.q_THD, self.k_TGD, self.v_TGF)
        ]
        out_THF, lse_TH = function(*leaves)
        # Not autograd.grad, which reentrant checkpoints refuse.
        out_THF.backward(self.dout_THF.to(device, dtype))
        results = out_THF.detach(), lse_TH.detach(), *(leaf.grad for leaf in leaves)
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
        """Masked dense attention under the mask of the definition, which is that of the lists."""
        assert torch.equal(self.mask_HTT, self.listed_HTT)
        return self.plain(torch.float64)

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
    value_dim: int | None = None,
    kind: str = "previous-block",
    heads: int = 4,
    kv_heads: int = 2,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Case:
    generator = torch.Generator().manual_seed(cu_seqlens[-1] + kv_heads)
    tokens = cu_seqlens[-1]
    value_dim = value_dim or head_dim
    shapes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim), (heads, value_dim)
    q, k, v, dout = (torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in shapes)
    layout = packed_layout(cu_seqlens, block, "cpu")
    selection = selected(kind, q, k, layout, budgets)
    return Case(q, k, v, dout, budgets, kind, selection, device)


def drawn(tokens: int, *heads: int, head_dim: int = 8, seed: int = 0) -> list[Tensor]:
    """Normal numbers [tokens, heads, head dim], for each number of heads."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, each, head_dim, generator=generator) for each in heads]


def ranked(
    selector: Any,
    qk: Sequence[Tensor],
    layout: PackedLayout,
    *,
    softmax_scale: float = SCALE,
    max_budget: int = 99,
    observe: bool = False,
) -> Any:
    """The selector's ranking of queries and keys of one sequence."""
    return rank_sequence(
        *(selector, *qk, layout),
        softmax_scale=softmax_scale,
        max_budget=max_budget,
        observe=observe,
    )


def selected(
    name: str, q_THD: Tensor, k_TGD: Tensor, layout: PackedLayout, budgets: Sequence[int]
) -> Selection:
    """What a built-in selector selects, without coverage."""
    selector = selector_named(name)
    ranking = ranked(selector, [q_THD, k_TGD], layout, max_budget=max(budgets))
    return selector.select(ranking, torch.tensor(budgets, device=q_THD.device))


def reselected(case: Case) -> Case:
    """The case with the lists that its queries and keys give."""
    layout = case.selection.query_layout
    selection = selected(case.kind, case.q_THD, case.k_TGD, layout, case.budgets)
    return dataclasses.replace(case, selection=selection)


def assert_exact(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Assert equal out, lse, dq, dk and dv to float64's rounding."""
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, atol=1e-12, rtol=1e-12)


def assert_identical(a: Sequence[Tensor], b: Sequence[Tensor]) -> None:
    """Assert equal bits of out, lse, dq, dk and dv."""
    for name, x, y in zip(NAMES, a, b, strict=True):
        assert torch.equal(x, y), name


def with_lists(case: Case, indices_QCK: Tensor, counts_QC: Tensor) -> Case:
    changed = dataclasses.replace(case.selection, indices_QCK=indices_QCK, counts_QC=counts_QC)
    return dataclasses.replace(case, selection=changed)


def lists_within(
    layout: PackedLayout, indices_QCK: Tensor, counts_QC: Tensor, *, by_token: bool
) -> Selection:
    """A selection whose queries and keys lie in the same sequence."""
    lists = {"indices_QCK": indices_QCK, "counts_QC": counts_QC, "by_token": by_token}
    return dataclasses.replace(Selection.of_documents(layout), **lists)


def with_columns(case: Case, tokens_NGK: Tensor, counts_NG: Tensor) -> Case:
    columns = ColumnLists(tokens_NGK=tokens_NGK, counts_NG=counts_NG)
    selection = dataclasses.replace(case.selection, columns=columns)
    return dataclasses.replace(case, selection=selection)


def with_random_columns(case: Case, most: int) -> Case:
    """Past tokens in any order: ``most`` and a third of that in turn, where there are so many; past
    the end of a list no token's number."""
    generator, lists = random.Random(most), case.selection
    layout, (rows, heads, _) = lists.kv_layout, lists.indices_QCK.shape
    tokens_NGK = torch.full((rows, heads, most), 1 << 30, dtype=torch.int32)
    counts_NG = torch.zeros(rows, heads, dtype=torch.int32)
    for row in range(rows):
        first = layout.cu_seqlens[int(layout.document_N[row])]
        past = range(first, int(layout.start_N[row]))
        for head in range(heads):
            read = set(lists.indices_QCK[row, head, : int(lists.counts_QC[row, head])].tolist())
            left = [token for token in past if int(layout.block_T[token]) not in read]
            length = most if (row + head) % 2 else most // 3
            chosen = generator.sample(left, min(length, len(left)))
            tokens_NGK[row, head, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
            counts_NG[row, head] = len(chosen)
    return with_columns(case, tokens_NGK, counts_NG)


def compute_as_off_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``blocks`` and ``tokens`` compute without torch's CPU kernels."""
    monkeypatch.setattr(tile_attention, "takes_flash", lambda device: False)


def on_device(selection: Selection, device: str) -> Selection:
    if device == "cpu":
        return selection
    query_layout, kv_layout = (
        packed_layout(layout.cu_seqlens, layout.block_size, device)
        for layout in (selection.query_layout, selection.kv_layout)
    )
    same = selection.query_layout is selection.kv_layout
    return dataclasses.replace(
        selection.with_tensors([x.to(device) for x in selection.tensors()]),
        query_layout=query_layout,
        kv_layout=query_layout if same else kv_layout,
    )


def with_heads_far_apart(x_THD: Tensor, file: Path) -> Tensor:
    """A copy, the third head more than 2^31 elements behind the first.

    In a file of which only these values take space.
    """
    _, heads, head_dim = x_THD.shape
    stride = (1 << 30) + 16
    memory = torch.from_file(os.fspath(file), shared=True, size=heads * stride, dtype=x_THD.dtype)
    far_THD = memory.as_strided(x_THD.shape, (head_dim, stride, 1))
    far_THD.copy_(x_THD)
    return far_THD


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


def assert_right(
    case: Case, dtype: torch.dtype = torch.float32, implementation: str = "triton"
) -> None:
    """Results have their dtypes, and are as good as plain torch."""
    ours = case.ours(implementation, dtype)
    assert [x.dtype for x in ours] == [dtype, torch.float32, dtype, dtype, dtype]
    assert_as_good_as_plain(case, ours, dtype, case.plain(torch.float64))
