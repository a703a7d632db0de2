# SPDX-License-Identifier: Apache-2.0
"""Who is compared in ``kernels.py``, and on what rows and selections.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim.
"""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
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

OPTIONAL = ("flash_attn", "flash_moba", "fla", "mcore_bridge")
"""Packages whose attention takes part where they are installed."""
MCORE_BRIDGE_ENTRY_TOKENS = 32
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
    """Contenders that read the selected pairs, or as many. FlashMoBA knows one budget a row.

    Of others, those that know blocks alone do not read columns.
    """
    contenders = {"triton": ours(selection, shape, "triton")}
    if selection.columns is not None:
        return contenders | {"blocks": ours(selection, shape, "blocks")}
    if not selection.by_token:
        contenders["flex"] = _flex(selection, shape)
    if importlib.util.find_spec("flash_moba") is not None and not case.skewed:
        contenders["FlashMoBA"] = _flash_moba(case)
    if importlib.util.find_spec("fla") is not None and not selection.by_token:
        contenders["fla nsa"] = _fla_nsa(selection, shape)
    if importlib.util.find_spec("mcore_bridge") is not None:
        contenders["mcore-bridge qsa"] = mcore_bridge(selection)
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


def _fla_nsa(selection: Selection, shape: Shape) -> Attend:
    """The selection, spread to tokens. For groups of 16 query heads or more: ``--kv-heads 1``."""
    from fla.ops.nsa.parallel import parallel_nsa

    layout = selection.query_layout
    # It counts blocks from the document's first.
    first_N = layout.first_block_S[layout.document_N]
    indices_NGK = (selection.indices_QCK - first_N[:, None, None]).clamp(min=0)
    indices_TGK = indices_NGK[layout.block_T].long()[None]
    counts_TG = selection.counts_QC[layout.block_T].long()[None]
    ends = torch.tensor(layout.cu_seqlens, device=indices_TGK.device)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return parallel_nsa(
            q[None],
            k[None],
            v[None],
            block_indices=indices_TGK,
            block_counts=counts_TG,
            block_size=layout.block_size,
            scale=shape.softmax_scale,
            cu_seqlens=ends,
        )[0]

    return attend


def mcore_bridge(selection: Selection) -> Attend:
    """The selection as mcore-bridge's kernel takes it, its module loaded without the package.

    It takes one list for all heads of a call, so KV heads take turns, and entries of 32 tokens.

    Raises:
        ValueError: when called, if every query head selects for itself, or the block size is no
            multiple of an entry.
    """
    kernels = _module_of("mcore_bridge", "model/modules/kernels/qsa_block_sparse_attn.py")
    layout = selection.query_layout
    entries_N = -(-layout.length_N // MCORE_BRIDGE_ENTRY_TOKENS)
    document_T = layout.document_N[layout.block_T]
    first_entry_N = entries_N.cumsum(0) - entries_N
    first_T, number_T, entry_T = (
        x_T.int()
        for x_T in (
            layout.start_N[layout.first_block_S][document_T],
            torch.arange(layout.tokens, device=document_T.device),
            first_entry_N[layout.first_block_S][document_T],
        )
    )
    chosen_C = [_entries_of(selection, head, entries_N) for head in range(_lists(selection))]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if len(chosen_C) != k.shape[1]:
            raise ValueError("one list for all heads of a group, and every query head has its own")
        if layout.block_size % MCORE_BRIDGE_ENTRY_TOKENS:
            raise ValueError(f"blocks of a multiple of {MCORE_BRIDGE_ENTRY_TOKENS} tokens only")
        parts = [
            kernels.qsa_block_sparse_attention_triton(
                *(q_head, k[:, head : head + 1], v[:, head : head + 1]),
                *(chosen_C[head], first_T, number_T, entry_T, first_T),
                scale=q.shape[-1] ** -0.5,
                block_size=MCORE_BRIDGE_ENTRY_TOKENS,
            )
            for head, q_head in enumerate(q.chunk(k.shape[1], dim=1))
        ]
        return torch.cat(parts, dim=1)

    return attend


def _lists(selection: Selection) -> int:
    return selection.counts_QC.shape[1]


def _entries_of(selection: Selection, head: int, entries_N: Tensor) -> Tensor:
    """[T, entries] uint8: what a head's lists hold, for every token."""
    lists_QK, counts_Q = selection.indices_QCK[:, head].long(), selection.counts_QC[:, head]
    places_K = torch.arange(lists_QK.shape[1], device=lists_QK.device)
    listed_QK = places_K < counts_Q[:, None]
    chosen_QN = torch.zeros(
        len(lists_QK), len(entries_N), dtype=torch.uint8, device=lists_QK.device
    )
    rows_Q1 = torch.arange(len(lists_QK), device=lists_QK.device)[:, None].expand_as(lists_QK)
    chosen_QN[rows_Q1[listed_QK], lists_QK[listed_QK]] = 1
    chosen = chosen_QN.repeat_interleave(entries_N, dim=1)
    return chosen if selection.by_token else chosen[selection.query_layout.block_T]


def _module_of(package: str, path: str) -> Any:
    """A module of an installed package, which need not be importable itself."""
    found = importlib.util.find_spec(package)
    assert found is not None and found.submodule_search_locations is not None
    location = Path(found.submodule_search_locations[0], path)
    spec = importlib.util.spec_from_file_location(location.stem, location)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _boundaries(case: Case) -> tuple[Tensor, int]:
    ends = torch.tensor(case.boundaries, dtype=torch.int32, device="cuda")
    return ends, max(b - a for a, b in itertools.pairwise(case.boundaries))
