# SPDX-License-Identifier: Apache-2.0
"""Who is compared in ``kernels.py``, and on what rows and selections.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsebalance_megatron.attention.api import block_sparse_attention
from sparsebalance_megatron.attention.layout import packed_layout
from sparsebalance_megatron.attention.select import rank_sequence, selector_named
from sparsebalance_megatron.attention.selection import Selection

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""out_THD of q_THD, k_TGD and v_TGD."""

OPTIONAL = ("flash_attn", "flash_moba")
"""Packages whose attention takes part where they are installed."""
DEFAULT_TOKENS = 8192
"""Tokens that the default budget reads: 32 blocks of 256."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The default is the attention of Qwen2.5-3B."""

    query_heads: int = 16
    kv_heads: int = 2
    head_dim: int = 128

    @property
    def softmax_scale(self) -> float:
        return self.head_dim**-0.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Where budgets are skewed the row holds two documents, and the second one has a quarter."""

    tokens: int
    block_size: int
    budget: int
    skewed: bool
    selection: str = "previous-block"

    @property
    def name(self) -> str:
        kind = "skewed" if self.skewed else "uniform"
        return (
            f"{self.tokens} tokens, block {self.block_size}, budget {self.budget}, {kind}, "
            f"{self.selection}"
        )

    @property
    def boundaries(self) -> list[int]:
        return [0, self.tokens // 2, self.tokens] if self.skewed else [0, self.tokens]

    @property
    def budgets(self) -> list[int]:
        return [self.budget, max(1, self.budget // 4)] if self.skewed else [self.budget]


def cases(
    tokens: list[int],
    block_sizes: list[int],
    selections: Sequence[str] = ("previous-block",),
) -> Iterator[Case]:
    """Densities of 6, 25 and 75 %, and the default budget."""
    for row, block_size, selection in itertools.product(tokens, block_sizes, selections):
        blocks = -(-row // block_size)
        default = min(blocks, max(1, DEFAULT_TOKENS // block_size))
        budgets = {max(1, round(blocks * share)) for share in (0.03, 0.13, 0.5)}
        for budget in sorted(budgets | {default}):
            yield Case(
                tokens=row,
                block_size=block_size,
                budget=budget,
                skewed=False,
                selection=selection,
            )
        yield Case(
            tokens=row, block_size=block_size, budget=default, skewed=True, selection=selection
        )


def selection_of(case: Case, shape: Shape, device: torch.device) -> Selection:
    """The own block and random past ones, or columns."""
    selector = selector_named(case.selection)
    layout = packed_layout(case.boundaries, case.block_size, device)
    generator = torch.Generator(device).manual_seed(0)
    q_THD, k_TGD = (
        torch.randn(case.tokens, heads, 16, generator=generator, device=device)
        for heads in (shape.query_heads, shape.kv_heads)
    )
    ranking = rank_sequence(
        selector,
        *(q_THD, k_TGD, layout),
        softmax_scale=shape.softmax_scale,
        max_budget=case.budget,
        observe=False,
    )
    return selector.select(ranking, torch.tensor(case.budgets, device=device))


def inputs_of(case: Case, shape: Shape, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Random q_THD, k_TGD and v_TGD that require gradients."""
    generator = torch.Generator(device).manual_seed(1)
    return [
        torch.randn(
            case.tokens, heads, shape.head_dim, generator=generator, device=device, dtype=dtype
        ).requires_grad_()
        for heads in (shape.query_heads, shape.kv_heads, shape.kv_heads)
    ]


def selected_pairs(selection: Selection, shape: Shape) -> int:
    """Query, key pairs that the selection lets be read, summed over query heads."""
    layout, heads = selection.query_layout, selection.counts_QC.shape[1]
    if selection.by_token:
        places_T = torch.arange(layout.tokens, device=layout.block_T.device)
        own_Q1 = (places_T - layout.start_N[layout.block_T] + 1)[:, None]
        readers_Q1 = torch.ones_like(own_Q1)
    else:
        readers_Q1 = layout.length_N[:, None]
        own_Q1 = readers_Q1 * (readers_Q1 + 1) // 2
    past_QC = (selection.counts_QC - 1) * readers_Q1 * layout.block_size
    if selection.columns is not None:
        past_QC += selection.columns.counts_NG * readers_Q1
    return int((past_QC + own_Q1).sum()) * (shape.query_heads // heads)


def causal_pairs(case: Case, shape: Shape) -> int:
    """Query, key pairs of dense causal attention in every document, summed over query heads."""
    lengths = (b - a for a, b in itertools.pairwise(case.boundaries))
    return shape.query_heads * sum(n * (n + 1) // 2 for n in lengths)


def ours(selection: Selection, shape: Shape, implementation: Any) -> Attend:
    """This package's attention."""
    return lambda q, k, v: block_sparse_attention(
        q, k, v, selection, softmax_scale=shape.softmax_scale, implementation=implementation
    )[0]


def dense(case: Case, shape: Shape) -> dict[str, Attend]:
    """Contenders that read every pair."""
    contenders = {
        "dense cudnn": _dense(case, shape, SDPBackend.CUDNN_ATTENTION),
        "dense flash": _dense(case, shape, SDPBackend.FLASH_ATTENTION),
    }
    if importlib.util.find_spec("flash_attn") is not None:
        contenders["dense flash-attn"] = _flash_attn(case, shape)
    return contenders


def sparse(case: Case, shape: Shape, selection: Selection) -> dict[str, Attend]:
    """Contenders that read the selected pairs, or as many. FlashMoBA knows one budget a row, and
    the others that know blocks alone do not read columns."""
    contenders = {"triton": ours(selection, shape, "triton")}
    if selection.columns is not None:
        return contenders | {"blocks": ours(selection, shape, "blocks")}
    if not selection.by_token:
        contenders["flex"] = _flex(selection, shape)
    if importlib.util.find_spec("flash_moba") is not None and not case.skewed:
        contenders["FlashMoBA"] = _flash_moba(case)
    return contenders


def on_cpu(selection: Selection, case: Case, shape: Shape) -> dict[str, Attend]:
    """What can be run where there is no GPU; "triton" needs Triton's interpreter."""
    names = ("triton", "tokens" if selection.by_token else "blocks", "reference")
    return {name: ours(selection, shape, name) for name in names} | {
        "dense math": _dense(case, shape, SDPBackend.MATH)
    }


def _dense(case: Case, shape: Shape, backend: SDPBackend) -> Attend:
    """Causal attention of every document of its own."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = []
        with sdpa_kernel(backend):
            for begin, end in itertools.pairwise(case.boundaries):
                rows = (x[begin:end].transpose(0, 1)[None] for x in (q, k, v))
                out = scaled_dot_product_attention(
                    *rows, is_causal=True, scale=shape.softmax_scale, enable_gqa=True
                )
                parts.append(out[0].transpose(0, 1))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    return attend


def _flex(selection: Selection, shape: Shape) -> Attend:
    """FlexAttention with its mask made beforehand, as one makes it that serves many layers.

    Rows are of whole blocks, so that nothing needs to be padded.
    """
    from flex_attention import block_mask, compiled_flex_attention

    mask = block_mask(selection, shape.query_heads // shape.kv_heads)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = compiled_flex_attention()(
            *heads_first, block_mask=mask, scale=shape.softmax_scale, enable_gqa=True
        )
        return out[0].transpose(0, 1)

    return attend


def _flash_attn(case: Case, shape: Shape) -> Attend:
    from flash_attn import flash_attn_varlen_func

    ends, longest = _boundaries(case)
    return lambda q, k, v: flash_attn_varlen_func(
        q, k, v, ends, ends, longest, longest, softmax_scale=shape.softmax_scale, causal=True
    )


def _flash_moba(case: Case) -> Attend:
    """Selects for itself, per token and query head; its router is within its forward time."""
    from flash_moba import flash_moba_varlen_func

    ends, longest = _boundaries(case)
    return lambda q, k, v: flash_moba_varlen_func(
        q, k, v, ends, ends, longest, longest, case.block_size, case.budget, causal=True
    )


def _boundaries(case: Case) -> tuple[Tensor, int]:
    ends = torch.tensor(case.boundaries, dtype=torch.int32, device="cuda")
    return ends, max(b - a for a, b in itertools.pairwise(case.boundaries))
