# SPDX-License-Identifier: Apache-2.0
"""Block-sparse attention: one operation over a selection, and one call that selects as well.

Shape legend: T tokens of the packed sequence (of queries or of keys, which may differ).
"""

import operator
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from sparsebalance_megatron.attention.device import copied_to
from sparsebalance_megatron.attention.kernels import (
    blocks,
    dense,
    fa4,
    fa4_lists,
    reference,
    tokens,
    triton,
)
from sparsebalance_megatron.attention.kernels.contract import Attention, Implementation
from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout
from sparsebalance_megatron.attention.select import Selector, rank_sequence, selector_named
from sparsebalance_megatron.attention.selection import Selection
from sparsebalance_megatron.config import (
    DEFAULT_SELECTION,
    AttentionImplementation,
    DenseAttention,
)

KERNELS: Mapping[str, Implementation] = {
    "triton": triton,
    "fa4": fa4_lists,
    "blocks": blocks,
    "tokens": tokens,
    "reference": reference,
}
"""Kernels by implementation; "auto" stands for one of them."""
DENSE_KERNELS: Mapping[str, Any] = {"fa4": fa4, "torch": dense}
"""Kernels of whole documents; "auto" is the first that serves."""
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def budgeted_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    cu_seqlens: Sequence[int] | Tensor,
    budgets: int | Sequence[int],
    *,
    block_size: int,
    softmax_scale: float,
    selection: str | Selector[Any, Any] = DEFAULT_SELECTION,
    implementation: AttentionImplementation = "auto",
) -> tuple[Tensor, Tensor]:
    """Causal attention of packed documents, each query reading the best blocks its budget allows.

    Differentiable in q, k and v. To select once and attend often, or to observe coverage, call the
    steps yourself. Documents of 1,000 and 3,000 tokens, whose queries read 4 and 8 blocks of 128::

        q, k, v = (torch.randn(4000, heads, 64, requires_grad=True) for heads in (8, 2, 2))
        how = {"block_size": 128, "softmax_scale": 64**-0.5}
        out, lse = budgeted_attention(q, k, v, [0, 1000, 4000], [4, 8], **how)
        out.sum().backward()

    Other arguments and results are those of :func:`block_sparse_attention`.

    Args:
        cu_seqlens: S + 1 document boundaries in tokens, from 0 to T; ints, or a tensor on the CPU.
        budgets: KV blocks that a query may read, its own included: one for all documents, or S.
        selection: who selects: a name that ``--sparse-balance-selection`` takes, or a selector.

    Raises:
        ValueError: an argument does not fit; the message names it and says what to do.
    """
    selector = selector_named(selection) if isinstance(selection, str) else selection
    if isinstance(cu_seqlens, Tensor):
        if cu_seqlens.device.type != "cpu":
            raise ValueError(
                f"budgeted_attention: cu_seqlens lies on {cu_seqlens.device}, and reading it would "
                "stop the host: pass a sequence of ints, or a tensor on the CPU"
            )
        cu_seqlens = cu_seqlens.tolist()
    layout = packed_layout(cu_seqlens, block_size, q_THD.device)
    try:
        of_each = budgets if isinstance(budgets, Iterable) else [budgets] * layout.documents
        budgets = list(map(operator.index, of_each))
    except TypeError:
        raise ValueError(
            f"budgeted_attention: budgets {budgets}: must be whole numbers of blocks"
        ) from None
    if len(budgets) != layout.documents or min(budgets) < 1:
        raise ValueError(
            f"budgeted_attention: budgets {budgets}: must be one number of blocks, or one for each "
            f"of the {layout.documents} documents of cu_seqlens, all at least 1 (the own block)"
        )
    ranking = rank_sequence(
        *(selector, q_THD, k_TGD, layout),
        softmax_scale=softmax_scale,
        max_budget=max(budgets),
        observe=False,
    )
    budgets_S = copied_to(torch.tensor(budgets), q_THD.device)
    return block_sparse_attention(
        *(q_THD, k_TGD, v_TGF, selector.select(ranking, budgets_S)),
        softmax_scale=softmax_scale,
        implementation=implementation,
    )


def block_sparse_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    selection: Selection,
    *,
    softmax_scale: float,
    implementation: AttentionImplementation = "auto",
    sink_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of every query over its selected KV blocks.

    Differentiable in q, k and v through the output; the selection gets no gradient, as in MoBA.

    Args:
        q_THD: queries; H is a multiple of G, query head h reads KV head h // (H / G).
        k_TGD, v_TGF: keys and values, same dtype and device, of the selection's ``kv_layout``.
        selection: which blocks are read, on the same device. Lists without the own block are
            parts, whose results :func:`.kernels.contract.merge_partials` puts together.
        softmax_scale: factor on q . k.
        implementation: who computes.

            - "triton": kernels, for every selection on CUDA; blocks of at least 16 tokens, a power
              of two, head dims up to 256, no float64. Deterministic, and without a host
              synchronisation.
            - "fa4": FlashAttention-4, for lists that a block of queries shares, on Hopper and
              Blackwell; results do not repeat bit by bit.
            - "blocks": gathered blocks through torch's products, for selections by query block;
              "tokens": gathered tokens, for selections by token. On CUDA the host waits for them.
            - "reference": masked dense attention, for every selection, in time quadratic in a
              document's length.
            - "auto": on CUDA "triton" where that serves; else "blocks" or, for selections by
              token, "tokens", with a warning on CUDA.
        sink_H: for each query head the score of a key of value 0 that all its queries read besides
            ("attention sink"); differentiable. None for none.

    Returns:
        out_THF in the inputs' dtype, and lse_TH: natural log-sum-exp of the scaled scores read, the
        sink's included, float32 (float64 for float64 inputs), not differentiable. A query that
        reads nothing has out 0 and lse -inf.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or the implementation does not serve the
            selection. An explicit choice never falls back.
    """
    kernel = checked_kernel(q_THD, k_TGD, v_TGF, selection, implementation, sink_H)
    return Attention.apply(q_THD, k_TGD, v_TGF, sink_H, selection, softmax_scale, kernel)


def dense_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    layout: PackedLayout,
    *,
    softmax_scale: float,
    kernel: DenseAttention = "auto",
    sink_H: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention within the documents of a packed sequence, without lists.

    Other arguments and results are those of :func:`block_sparse_attention`.

    Args:
        kernel: who computes: FlashAttention-4, torch's own, or the first of them that serves, also
            where a layer's own attention is named.

    Raises:
        ValueError: shapes, dtypes or devices do not fit, or there is no kernel for them.
    """
    chosen = check_dense(q_THD, k_TGD, v_TGF, layout, kernel, sink_H)
    selection = Selection.of_documents(layout)
    return Attention.apply(q_THD, k_TGD, v_TGF, sink_H, selection, softmax_scale, chosen)


def check_dense(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    layout: PackedLayout,
    kernel: DenseAttention = "auto",
    sink_H: Tensor | None = None,
) -> Any:
    """The kernel that :func:`dense_attention` takes; raises what that would."""
    _check_tensors(q_THD, k_TGD, v_TGF, Selection.of_documents(layout), sink_H)
    name, obstacle = dense_kernel(q_THD, v_TGF, layout, kernel)
    if obstacle is not None:
        raise _error(f'dense attention, kernel "{name}", {obstacle}; or use "torch" or lists')
    return DENSE_KERNELS[name]


def dense_kernel(
    q_THD: Tensor, v_TGF: Tensor, layout: PackedLayout, kernel: DenseAttention
) -> tuple[str, str | None]:
    """Name of the kernel that :func:`dense_attention` takes, and why it does not serve; None where
    it does."""
    name, obstacle = "", None
    for name in (kernel,) if kernel in DENSE_KERNELS else DENSE_KERNELS:
        obstacle = DENSE_KERNELS[name].obstacle(q_THD, v_TGF, layout)
        if obstacle is None:
            break
    return name, obstacle


def attends_densely(
    q_THD: Tensor,
    v_TGF: Tensor,
    layout: PackedLayout,
    implementation: AttentionImplementation,
    kernel: DenseAttention = "auto",
) -> bool:
    """Whether :func:`dense_attention` serves here, and the implementation leaves it the choice.

    Kernels that were named for their lists, and the reference, compute all that is asked of them.
    FlashAttention-4, if named, is never replaced by lists.
    """
    if implementation in ("triton", "reference"):
        return False
    return kernel == "fa4" or dense_kernel(q_THD, v_TGF, layout, kernel)[1] is None


def checked_kernel(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    selection: Selection,
    implementation: AttentionImplementation,
    sink_H: Tensor | None = None,
) -> Implementation:
    """The implementation that :func:`block_sparse_attention` takes, all arguments checked."""
    _check_tensors(q_THD, k_TGD, v_TGF, selection, sink_H)
    _check_selection(q_THD, k_TGD, selection)
    return KERNELS[_resolve(implementation, q_THD, v_TGF, selection)]


def _resolve(implementation: str, q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str:
    other = "tokens" if selection.by_token else "blocks"
    automatic = implementation == "auto"
    if automatic and q_THD.device.type != "cuda":
        return other
    name = "triton" if automatic else implementation
    if name not in KERNELS:
        known = ", ".join(f'"{name}"' for name in get_args(AttentionImplementation))
        raise _error(f"implementation {implementation!r}: must be one of {known}")
    obstacle = KERNELS[name].obstacle(q_THD, v_TGF, selection)
    if obstacle is None:
        return name
    if not automatic:
        raise _error(f'implementation "{name}" {obstacle}')
    warnings.warn(
        f'block_sparse_attention: "auto" takes "{other}" on CUDA, slowly: "triton" {obstacle}',
        stacklevel=4,
    )
    return other


def _check_tensors(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGF: Tensor,
    selection: Selection,
    sink_H: Tensor | None,
) -> None:
    shapes = ", ".join(str(tuple(x.shape)) for x in (q_THD, k_TGD, v_TGF))
    if not q_THD.ndim == k_TGD.ndim == v_TGF.ndim == 3:
        raise _error(f"q, k, v have shapes {shapes}: must be [tokens, heads, head dim]")
    if k_TGD.shape[:2] != v_TGF.shape[:2] or q_THD.shape[2] != k_TGD.shape[2]:
        raise _error(
            f"q, k, v have shapes {shapes}: k and v must agree in tokens and heads, q and k in the "
            "head dim"
        )
    queries, keys = selection.query_layout.tokens, selection.kv_layout.tokens
    if (q_THD.shape[0], k_TGD.shape[0]) != (queries, keys):
        raise _error(
            f"q, k, v have shapes {shapes}: q must have the {queries} tokens of the selection's "
            f"query layout, k and v the {keys} tokens of its KV layout"
        )
    if k_TGD.shape[1] == 0 or q_THD.shape[1] % k_TGD.shape[1]:
        raise _error(f"{q_THD.shape[1]} query heads are no multiple of {k_TGD.shape[1]} KV heads")
    if not q_THD.dtype == k_TGD.dtype == v_TGF.dtype or q_THD.dtype not in _DTYPES:
        raise _error(
            f"q, k, v have dtypes {q_THD.dtype}, {k_TGD.dtype}, {v_TGF.dtype}: must share one of "
            "float16, bfloat16, float32, float64"
        )
    devices = {x.device for x in (q_THD, k_TGD, v_TGF, *selection.tensors())}
    if len(devices) > 1:
        raise _error(
            f"q, k, v and the selection lie on {sorted(map(str, devices))}: must share one"
        )
    if sink_H is not None and (sink_H.shape, sink_H.device) != (q_THD.shape[1:2], q_THD.device):
        raise _error(
            f"sink has shape {tuple(sink_H.shape)} on {sink_H.device}: must have one score for "
            f"each of the {q_THD.shape[1]} query heads, on {q_THD.device}"
        )


def _check_selection(q_THD: Tensor, k_TGD: Tensor, selection: Selection) -> None:
    query_heads, kv_heads, columns = q_THD.shape[1], k_TGD.shape[1], selection.columns
    rows, heads = selection.selecting_rows, selection.counts_QC.shape[-1]
    allowed = (kv_heads, query_heads) if selection.by_token else (kv_heads,)
    lists = {"lists": (selection.indices_QCK, selection.counts_QC)}
    if columns is not None:
        lists["columns"] = columns.tokens_NGK, columns.counts_NG
    for name, (entries_QCK, counts_QC) in lists.items():
        shapes = tuple(entries_QCK.shape), tuple(counts_QC.shape)
        unserved = name == "columns" and selection.by_token
        if (shapes[0][:-1], shapes[1]) != ((rows, heads),) * 2 or heads not in allowed or unserved:
            raise _error(
                f"selection by {'token' if selection.by_token else 'query block'} has {name} "
                f"{shapes[0]} and counts {shapes[1]}: must be [{rows} rows, "
                f"{' or '.join(map(str, dict.fromkeys(allowed)))} heads, length] and the same "
                "without length, and columns only where query blocks select"
            )
    sizes = selection.query_layout.block_size, selection.kv_layout.block_size
    own = tuple(selection.own_block_N.shape)
    if sizes[0] != sizes[1] or own != (selection.query_layout.blocks,):
        raise _error(
            f"selection has blocks of {sizes[0]} tokens for queries and of {sizes[1]} for keys, "
            f"and own_block_N of shape {own}: must share one block size, and name one own block "
            f"for each of the {selection.query_layout.blocks} query blocks"
        )


def _error(message: str) -> ValueError:
    return ValueError(f"block_sparse_attention: {message}")
