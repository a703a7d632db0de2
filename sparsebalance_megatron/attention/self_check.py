# SPDX-License-Identifier: Apache-2.0
"""Compares a device's kernels and router with the reference, on a small ragged sequence."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.api import (
    attends_densely,
    block_sparse_attention,
    checked_kernel,
    dense_attention,
    dense_kernel,
)
from sparsebalance_megatron.attention.kernels.contract import wide_dtype
from sparsebalance_megatron.attention.layout import LayoutPair, PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import SparseBalanceConfig

_BLOCKS = (1.4, 5.7, 0.1)
"""Lengths of the documents, in blocks: short last blocks, and a document within one block."""
_BUDGETS = (2, 3, 1)
_MOST_KV_HEADS = 2
_ROUNDINGS, _WIDE_ROUNDINGS = 2.0, 64.0
"""Epsilons of the inputs' dtype, and of the one of sums, that a result may be off by, of itself and
of its tensor's largest entry: sums cancel."""
_ROWS_OF_OTHER_LISTS, _COVERAGE_TOLERANCE = 1e-3, 1e-3
"""Share of rows whose lists may differ: scores that are equal to rounding have either order."""
_REPEATS_ON_GPU = 16
"""Threads of a program exchange values through memory; a missing barrier shows now and then."""
_REPEATS_OF_FLASH_ATTENTION = 200
"""A version of FlashAttention-4 spoilt one backward launch in 100 to 1,000."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Which kernels were compared, of lists and of whole documents ("lists" where these have none);
    name -> largest error of a result, in tolerances."""

    kernel: str
    errors: dict[str, float]
    dense_kernel: str = "lists"

    def problems(self) -> list[str]:
        """The results that are out of tolerance, as phrases; an error may be NaN."""
        wrong = [(name, error) for name, error in self.errors.items() if not error <= 1.0]
        return [f"{name} is off by {error:.2g} times its tolerance" for name, error in wrong]


def check_attention(
    config: SparseBalanceConfig,
    heads: tuple[int, int],
    head_dims: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
) -> Verdict:
    """Compare out, lse, dq, dk, dv with the reference in float64, and lists and coverage with the
    router by torch on the CPU; of lists, and of whole documents where these need none. Triton's
    kernels run several times and must repeat every bit, those of whole documents many times, within
    tolerance.

    ``heads`` are of queries and of keys on a rank, ``head_dims`` of keys and of values.
    """
    boundaries = [0, *accumulate(max(1, int(blocks * config.block_size)) for blocks in _BLOCKS)]
    kv_heads = min(heads[1], _MOST_KV_HEADS)
    query_heads = heads[0] // heads[1] * kv_heads
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(boundaries[-1], *shape, generator=generator).to(dtype)

    # Queries that tell keys apart: an average over many keys would hide a wrong one.
    q_THD, k_TGD = 2.0 * drawn(query_heads, head_dims[0]), drawn(kv_heads, head_dims[0])
    inputs = (q_THD, k_TGD, drawn(kv_heads, head_dims[1]), drawn(query_heads, head_dims[1]))
    host, there = (packed_layout(boundaries, config.block_size, x) for x in ("cpu", device))
    trusted = config
    if hasattr(selector_named(config.selection), "with_router"):
        trusted = replace(config, router="torch")
    selection, lists_QCK, coverage = _routed(trusted, inputs, host)
    _, found_QCK, found_coverage = _routed(config, inputs, there)
    errors = {
        "lists": float((found_QCK != lists_QCK).any(-1).double().mean()) / _ROWS_OF_OTHER_LISTS,
        "coverage": float((found_coverage - coverage).abs().max()) / _COVERAGE_TOLERANCE,
    }
    lists = selection.with_tensors([x.to(device) for x in selection.tensors()])
    lists = replace(lists, query_layout=there, kv_layout=there)
    q_THD, k_TGD, v_TGF = (x.to(device) for x in inputs[:3])
    kernel: Any = checked_kernel(q_THD, k_TGD, v_TGF, lists, config.attention)
    name = kernel.__name__.rpartition(".")[2]
    repeats = {"triton": _REPEATS_ON_GPU, "fa4_lists": _REPEATS_OF_FLASH_ATTENTION}.get(name, 0)
    attend = partial(block_sparse_attention, selection=lists, implementation=config.attention)
    errors |= _compared(
        *(attend, inputs, selection, device),
        repeats=repeats if device.type == "cuda" else min(repeats, 1),
        bit_by_bit=name != "fa4_lists",
    )
    served = config.attention, config.dense_attention
    if not attends_densely(q_THD, v_TGF, there, *served):
        return Verdict(kernel=name, errors=errors)
    found = _compared(
        partial(dense_attention, layout=there, kernel=config.dense_attention),
        *(inputs, Selection.of_everything(LayoutPair.within(host), kv_heads), device),
        repeats=_REPEATS_OF_FLASH_ATTENTION if device.type == "cuda" else 0,
        bit_by_bit=False,
    )
    return Verdict(
        kernel=name,
        errors=errors | {f"dense {result}": error for result, error in found.items()},
        dense_kernel=dense_kernel(q_THD, v_TGF, there, config.dense_attention)[0],
    )


def _compared(
    attend: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    selection: Selection,
    device: torch.device,
    *,
    repeats: int,
    bit_by_bit: bool,
) -> dict[str, float]:
    """Errors of results against the reference's in float64, which attends on the host to what
    ``selection`` says, and "repeats" where one of more runs has others."""
    trusted = partial(block_sparse_attention, selection=selection, implementation="reference")
    right = next(_runs(trusted, [x.double() for x in inputs], "cpu"))
    runs, dtype = _runs(attend, inputs, device), inputs[0].dtype
    first = next(runs)
    errors = _errors([x.cpu() for x in first], right, dtype)
    for again in islice(runs, repeats):
        same = all(error <= 1.0 for error in _errors(again, first, dtype).values())
        if not (all(map(torch.equal, first, again)) if bit_by_bit else same):
            errors["repeats"] = torch.inf
    return errors


def _runs(
    attend: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    device: torch.device | str,
) -> Iterator[list[Tensor]]:
    """out, lse, dq, dk and dv, of one run after the other."""
    q_THD, k_TGD, v_TGF, dout_THF = (x.to(device, copy=True) for x in inputs)
    qkv = q_THD.requires_grad_(), k_TGD.requires_grad_(), v_TGF.requires_grad_()
    while True:
        outputs = attend(*qkv, softmax_scale=q_THD.shape[-1] ** -0.5)
        results = [*outputs, *torch.autograd.grad(outputs[0], qkv, dout_THF)]
        yield [x.detach() for x in results]


def _errors(
    results: Sequence[Tensor], right: Sequence[Tensor], dtype: torch.dtype
) -> dict[str, float]:
    """Largest error of each result, in tolerances; NaN where it has one."""
    share = _ROUNDINGS * torch.finfo(dtype).eps
    share += _WIDE_ROUNDINGS * torch.finfo(wide_dtype(dtype)).eps
    errors = {}
    for name, result, exact in zip(("out", "lse", "dq", "dk", "dv"), results, right, strict=True):
        exact = exact.double()
        tolerance = share * (exact.abs() + exact.abs().max())
        errors[name] = float(((result.double() - exact).abs() / tolerance).max())
    return errors


def _routed(
    config: SparseBalanceConfig, inputs: Sequence[Tensor], layout: PackedLayout
) -> tuple[Selection, Tensor, Tensor]:
    """The selection, its lists with -1 past their ends, sorted, and coverage; both on the host."""
    device = layout.block_T.device
    selector = selector_named(config.selection, config.router)
    q_THD, k_TGD = (x.to(device) for x in inputs[:2])
    ranking = rank_sequence(
        *(selector, q_THD, k_TGD, layout),
        softmax_scale=q_THD.shape[-1] ** -0.5,
        max_budget=max(_BUDGETS),
        observe=True,
    )
    selection = selector.select(ranking, torch.tensor(_BUDGETS, device=device))
    entries_QCK, counts_QC, _, *columns = (x.cpu() for x in selection.tensors())
    cut = [
        x.masked_fill(torch.arange(x.shape[-1]) >= counts[..., None], -1).sort(-1)[0]
        for x, counts in [(entries_QCK, counts_QC), *([columns] if columns else [])]
    ]
    return selection, torch.cat(cut, -1), selector.coverage(ranking).cpu()
