# SPDX-License-Identifier: Apache-2.0
"""Compares the kernels and the router of a device with the reference, on a small ragged sequence.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim of keys, F of
values, S documents, K budgets, Q rows that select, C heads that select.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsebalance_megatron.attention.api import block_sparse_attention, checked_kernel
from sparsebalance_megatron.attention.kernels import reference
from sparsebalance_megatron.attention.kernels.contract import Saved, wide_dtype
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import AttentionImplementation, Router

_BLOCKS = (1.4, 5.7, 0.1)
"""Lengths of the documents, in blocks: short last blocks, and a document within one block."""
_BUDGETS = (2, 3, 1)
_MOST_KV_HEADS = 2
_ROUNDINGS = 8.0
"""Roundings of the inputs' dtype in every input that a result may be off by."""
_DRAWS = 3
"""Roundings are drawn so often: in one draw those of a short row may cancel."""
_WIDE_ROUNDINGS = 256.0
"""Roundings of sums, of a tensor's largest entry, that a row may be off by."""
_ROWS_OF_OTHER_LISTS = 1e-3
"""Share of rows whose lists may differ: scores that are equal to rounding have either order."""
_COVERAGE_TOLERANCE = 1e-3
_REPEATS_ON_GPU = 16
"""Threads of a program exchange values through memory behind barriers, whose lack would show now
and then only."""


@dataclass(frozen=True, kw_only=True)
class CheckedCase:
    """Shape and dtype of a check; heads are a rank's, and the name of the dtype is torch's."""

    selection: str
    implementation: AttentionImplementation
    router: Router
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    block_size: int
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of a check: which implementations were compared, and each result's largest error.

    ``found`` has the error and the tolerance of each result by name.
    """

    kernel: str
    found: dict[str, tuple[float, float]]

    def problems(self) -> list[str]:
        """The results that are out of tolerance, as phrases; an error may be NaN."""
        return [
            f"{name} is off by {error:.2e}, tolerance {tolerance:.2e}"
            for name, (error, tolerance) in self.found.items()
            if not error <= tolerance
        ]


def check_case(case: CheckedCase, device: torch.device) -> Verdict:
    """Compare out, lse, dq, dk, dv, lists and coverage on a small ragged sequence.

    The yardstick is the reference in float64. A row of a result may be off by some times what it
    changes by where every input, and out before backward, is rounded once. Lists and coverage are
    compared with the router by torch on the CPU, at the same inputs. Triton's kernels run several
    times and must repeat every bit.
    """
    dtype = getattr(torch, case.dtype)
    lengths = [max(1, int(blocks * case.block_size)) for blocks in _BLOCKS]
    boundaries = [0, *itertools.accumulate(lengths)]
    group, kv_heads = case.query_heads // case.kv_heads, min(case.kv_heads, _MOST_KV_HEADS)
    query_heads, head_dim, value_dim = group * kv_heads, case.head_dim, case.value_dim
    shapes = (
        *((query_heads, head_dim), (kv_heads, head_dim)),
        *((kv_heads, value_dim), (query_heads, value_dim)),
    )
    generator = torch.Generator().manual_seed(0)
    q_THD, k_TGD, v_TGF, dout_THF = (
        torch.randn(boundaries[-1], *shape, generator=generator).to(dtype) for shape in shapes
    )
    # Queries that tell keys apart: an average over many keys would hide a wrong one.
    inputs = (2.0 * q_THD, k_TGD, v_TGF, dout_THF)
    host = torch.device("cpu")
    torch_router: Router = (
        "torch" if hasattr(selector_named(case.selection), "with_router") else "auto"
    )
    selection, *expected = _routed(inputs, boundaries, case, torch_router, host)
    _, *found = _routed(inputs, boundaries, case, case.router, device)
    kernel, results = _attended(inputs, selection, boundaries, case, device)
    again: list[list[Tensor]] = []
    if kernel == "triton":
        repeats = _REPEATS_ON_GPU if device.type == "cuda" else 1
        again = [_attended(inputs, selection, boundaries, case, device)[1] for _ in range(repeats)]
    unit = torch.finfo(dtype).eps / 2

    def rounded(x: Tensor) -> Tensor:
        return x * (1.0 + unit * (2 * torch.randint(2, x.shape, generator=generator) - 1))

    wide = tuple(x.double() for x in inputs)
    exact = _by_reference(wide, selection, case, lambda x: x)
    moved = zip(
        *(
            _by_reference(tuple(map(rounded, wide)), selection, case, rounded)
            for _ in range(_DRAWS)
        ),
        strict=True,
    )
    wide_unit = torch.finfo(wide_dtype(dtype)).eps / 2
    names = ("out", "lse", "dq", "dk", "dv")
    compared = {
        name: _worst_row(result, right, others, wide_unit)
        for name, result, right, others in zip(names, results, exact, moved, strict=True)
    }
    differing_QC = (found[0] != expected[0]).any(-1)
    compared["lists"] = float(differing_QC.double().mean()), _ROWS_OF_OTHER_LISTS
    compared["coverage"] = float((found[1] - expected[1]).abs().max()), _COVERAGE_TOLERANCE
    if again:
        changes = [(x - y).abs().max() for xs in again for x, y in zip(xs, results, strict=True)]
        least = torch.finfo(torch.float32).tiny
        compared["repeats"] = float(torch.stack([x.double() for x in changes]).max()), least
    return Verdict(kernel=kernel, found=compared)


def _routed(
    inputs: tuple[Tensor, ...],
    boundaries: list[int],
    case: CheckedCase,
    router: Router,
    device: torch.device,
) -> tuple[Selection, Tensor, Tensor]:
    """The selection, its lists with -1 past their ends, sorted, and coverage; both on the host."""
    selector = selector_named(case.selection, router)
    q_THD, k_TGD = (x.to(device) for x in inputs[:2])
    ranking = rank_sequence(
        selector,
        q_THD,
        k_TGD,
        packed_layout(boundaries, case.block_size, device),
        softmax_scale=case.head_dim**-0.5,
        max_budget=max(_BUDGETS),
        observe=True,
    )
    selection = selector.select(ranking, torch.tensor(_BUDGETS, device=device))
    lists = [(selection.indices_QCK, selection.counts_QC)]
    if selection.columns is not None:
        lists.append((selection.columns.tokens_NGK, selection.columns.counts_NG))
    cut = [
        entries.cpu()
        .masked_fill(torch.arange(entries.shape[-1]) >= counts.cpu()[..., None], -1)
        .sort(-1)[0]
        for entries, counts in lists
    ]
    return selection, torch.cat(cut, -1), selector.coverage(ranking).cpu()


def _attended(
    inputs: tuple[Tensor, ...],
    selection: Selection,
    boundaries: list[int],
    case: CheckedCase,
    device: torch.device,
) -> tuple[str, list[Tensor]]:
    """Name of the implementation, and out, lse, dq, dk, dv on the host."""
    layout = packed_layout(boundaries, case.block_size, device)
    there = Selection.of_tensors(
        [x.to(device) for x in selection.tensors()],
        by_token=selection.by_token,
        query_layout=layout,
        kv_layout=layout,
    )
    q_THD, k_TGD, v_TGF = (x.to(device, copy=True).requires_grad_() for x in inputs[:3])
    kernel: Any = checked_kernel(q_THD, k_TGD, v_TGF, there, case.implementation)
    out_THF, lse_TH = block_sparse_attention(
        *(q_THD, k_TGD, v_TGF, there),
        softmax_scale=case.head_dim**-0.5,
        implementation=case.implementation,
    )
    gradients = torch.autograd.grad(out_THF, (q_THD, k_TGD, v_TGF), inputs[3].to(device))
    results = [x.detach().cpu() for x in (out_THF, lse_TH, *gradients)]
    return kernel.__name__.rpartition(".")[2], results


def _by_reference(
    inputs: tuple[Tensor, ...],
    selection: Selection,
    case: CheckedCase,
    change: Callable[[Tensor], Tensor],
) -> list[Tensor]:
    """out, lse, dq, dk, dv, with a change of what backward reads of out."""
    q_THD, k_TGD, v_TGF, dout_THF = inputs
    scale = case.head_dim**-0.5
    out_THF, lse_TH = reference.forward(q_THD, k_TGD, v_TGF, selection, softmax_scale=scale)
    saved = Saved(
        q_THD=q_THD,
        k_TGD=k_TGD,
        v_TGF=v_TGF,
        out_THF=change(out_THF),
        lse_TH=lse_TH,
        selection=selection,
        softmax_scale=scale,
    )
    return [out_THF, lse_TH, *reference.backward(dout_THF, saved)]


def _worst_row(
    result: Tensor, exact: Tensor, moved: Sequence[Tensor], wide_unit: float
) -> tuple[float, float]:
    """Error and tolerance of the row that is furthest out, a row being a token's head."""
    rows = exact.shape[:2].numel()

    def largest(x: Tensor) -> Tensor:
        return (x.double() - exact).abs().view(rows, -1).amax(1)

    error = largest(result)
    tolerance = _ROUNDINGS * torch.stack([largest(x) for x in moved]).amax(0)
    tolerance += _WIDE_ROUNDINGS * wide_unit * exact.abs().max()
    # A NaN counts as the largest.
    worst = int((error / tolerance).nan_to_num(nan=torch.inf).argmax())
    return float(error[worst]), float(tolerance[worst])


def ptxas(device: torch.device) -> str:
    """Version and path of the assembler that Triton takes for the device."""
    try:
        from triton import knobs
    except ImportError:
        return "none"
    tools: Any = knobs.nvidia
    tool = tools.ptxas
    if torch.cuda.get_device_capability(device)[0] >= 10:
        tool = getattr(tools, "ptxas_blackwell", tool)
    return f"{tool.version} ({tool.path})"
