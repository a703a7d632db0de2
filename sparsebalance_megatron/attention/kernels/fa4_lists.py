# SPDX-License-Identifier: Apache-2.0
"""Lists that a block of queries shares, by FlashAttention-4.

1. Every block takes as many places, with zeros behind a short one, and KV heads are the batch.
2. For a block of queries a list names tiles of keys, a block's one after the other. Tiles of past
   blocks are full. Those of the own block are partial: a mask lets a query read up to itself.
3. The backward pass takes the lists transposed: which blocks of queries read a tile of keys.

Places behind a document's last token nobody reads but themselves. Sums of dq, and of dk and dv
where query heads share a KV head, have any order.

Shape legend: Z places, H here the query heads of a KV head, X tiles of keys, L places of a list.
"""

import itertools
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebalance_megatron.attention.device import aligned
from sparsebalance_megatron.attention.kernels import fa4
from sparsebalance_megatron.attention.kernels.blocks import without_own_blocks
from sparsebalance_megatron.attention.kernels.contract import Inputs, Saved
from sparsebalance_megatron.attention.layout import PackedLayout
from sparsebalance_megatron.attention.selection import Selection

_TILES = {9: 128, 10: 256}
"""Keys that an entry of a list names, by compute capability."""
_MOST_HEAD_DIM = 128
_MOST_TOKENS = 1 << 20
"""Transposed lists grow with the square: 2 GB for 8 KV heads and blocks of 256."""


def tile_lists(selection: Selection, tile: int) -> list[Tensor]:
    """Entries of every block of queries, as FlashAttention-4 takes them: numbers of partial entries
    [G, 1, N], these [G, 1, N, L], and the same of full ones; int32, undefined past a list's end."""
    own_NG, past_NGK, past_NG = without_own_blocks(selection)
    own_NGK = selection.own_block_N[:, None, None].expand(*own_NG.shape, 1)
    tiles = selection.kv_layout.block_size // tile
    place_L, lists = torch.arange(tiles, device=own_NG.device), []
    for number_NG, blocks_NGK in ((own_NG, own_NGK), (past_NG, past_NGK)):
        lists += [number_NG * tiles, (blocks_NGK[..., None] * tiles + place_L).flatten(2)]
    return [x.transpose(0, 1)[:, None].int().contiguous() for x in lists]


def transposed(lists: Sequence[Tensor], tiles: int) -> list[Tensor]:
    """Entries of every tile of keys, in the form of :func:`tile_lists`: the blocks of queries that
    read it, rising."""
    of_keys = []
    for counts_G1N, entries_G1NL in itertools.batched(lists, 2):
        place_L = torch.arange(entries_G1NL.shape[3], device=counts_G1N.device)
        # What is past a list's end lands in an extra tile, which is cut off.
        entries_G1NL = entries_G1NL.where(place_L < counts_G1N[..., None], tiles)
        reads_G1NX = counts_G1N.new_zeros((*counts_G1N.shape, tiles + 1), dtype=torch.int8)
        reads_G1XN = reads_G1NX.scatter_(3, entries_G1NL.long(), 1)[..., :-1].mT.contiguous()
        of_keys += [reads_G1XN.sum(3), reads_G1XN.argsort(dim=3, descending=True, stable=True)]
    return [x.int() for x in of_keys]


def forward(given: Inputs) -> tuple[Tensor, Tensor]:
    """Attend over the lists; see :class:`.contract.Kernel`."""
    queries, keys = given.selection.query_layout, given.selection.kv_layout
    layouts, heads = (queries, keys, keys), given.k_TGD.shape[1]
    out_GZHF, lse_GHZ, *_ = fa4.interface()._flash_attn_fwd(
        *(_placed(x, at, heads) for x, at in zip(given.qkv, layouts, strict=True)),
        softmax_scale=given.softmax_scale,
        return_lse=True,
        **_lists(given.selection, by_key=False),
    )
    return _packed(out_GZHF, queries), _packed(lse_GHZ.transpose(1, 2), queries)


def backward(dout_THF: Tensor, saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys = saved.selection.query_layout, saved.selection.kv_layout
    inputs = *saved.qkv, saved.out_THF, dout_THF
    layouts, heads = (queries, keys, keys, queries, queries), saved.k_TGD.shape[1]
    gradients = fa4.interface()._flash_attn_bwd(
        *(_placed(x, at, heads) for x, at in zip(inputs, layouts, strict=True)),
        _placed(saved.lse_TH, queries, heads).transpose(1, 2).contiguous(),
        softmax_scale=saved.softmax_scale,
        **_lists(saved.selection, by_key=True),
    )
    dq, dk, dv = (_packed(x, at) for x, at in zip(gradients, layouts[:3], strict=True))
    return dq, dk, dv


def obstacle(q_THD: Tensor, v_TGF: Tensor, selection: Selection) -> str | None:
    """Say what FlashAttention-4 does not serve, and the remedy; None where it serves."""
    layout = selection.kv_layout
    if selection.by_token or selection.columns is not None:
        problem: str | None = "serves lists of blocks that a block of queries shares, no others"
    elif torch.are_deterministic_algorithms_enabled():
        problem = "repeats no bits, as deterministic algorithms must"
    elif layout.tokens > _MOST_TOKENS:
        problem = f"serves sequences of up to {_MOST_TOKENS} tokens, not {layout.tokens}"
    elif (problem := fa4.obstacle(q_THD, v_TGF, layout)) is None:
        if layout.block_size % (tile := _tile(q_THD.device)):
            problem = f"needs blocks of a multiple of {tile} tokens here, not {layout.block_size}"
        elif q_THD.shape[2] > _MOST_HEAD_DIM:
            problem = f"serves head dims up to {_MOST_HEAD_DIM} with lists, not {q_THD.shape[2]}"
    return None if problem is None else f'{problem}: use "triton"'


def _tile(device: torch.device) -> int:
    return _TILES[torch.cuda.get_device_capability(device)[0]]


def _placed(x_T: Tensor, layout: PackedLayout, kv_heads: int) -> Tensor:
    """[T, heads, ...] to [G, Z, H, ...]; a view where all blocks are full."""
    x_NB = layout.to_blocks(x_T)
    if missing := layout.block_size - layout.block_tokens:
        x_NB = pad(x_NB, (0, 0) * (x_T.ndim - 1) + (0, missing))
    return aligned(x_NB.flatten(0, 1).unflatten(1, (kv_heads, -1)).movedim(1, 0))


def _packed(x_GZH: Tensor, layout: PackedLayout) -> Tensor:
    """[G, Z, H, ...] to [T, heads, ...]."""
    x_NB = x_GZH.transpose(0, 1).flatten(1, 2).unflatten(0, (layout.blocks, -1))
    return layout.from_blocks(x_NB[:, : layout.block_tokens])


def _lists(selection: Selection, *, by_key: bool) -> dict[str, Any]:
    """Lists and mask, as both functions take them: of queries, or transposed."""
    layout, tile = selection.kv_layout, _tile(selection.own_block_N.device)
    lists = tile_lists(selection, tile)
    if by_key:
        lists = transposed(lists, layout.blocks * (layout.block_size // tile))
    tensors, mask = of_lists(layout.block_size)
    sparse = tensors(*lists, block_size=(layout.block_size, tile))
    return {"mask_mod": mask, "block_sparse_tensors": sparse}


@cache
def of_lists(block_size: int) -> tuple[Any, Any]:
    """FlashAttention-4's type of lists, and its mask of tiles of the own block."""
    import cutlass.cute as cute
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    @cute.jit
    def up_to_itself(b, h, q_idx, kv_idx, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
        return (q_idx % block_size) >= (kv_idx % block_size)

    return BlockSparseTensorsTorch, up_to_itself
