# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""Partial results of lists by token: their shape, and what the kernels that write them share.

Every entry of a list has a place of its own for the result of every query head, by token, place in
the list, part of the block where a program does not keep all of it, and head.

Shape legend: T tokens of the packed row, H query heads, D head dim; in kernels Y query rows of a
tile (token by token, heads side by side), C columns (keys) of a tile, O rows of output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton.forward_kernel import load_rows
from sparsebalance_megatron.attention.kernels.triton.tiles import SHARED_BYTES, Tile, capability_of
from sparsebalance_megatron.attention.kernels.triton.token_lists import (
    ChunkedLists,
    HeadSlice,
    chunked_lists,
)
from sparsebalance_megatron.attention.selection import Selection

_OTHER_BYTES = 3 << 10
"""Shared memory besides matrices: LSE and delta of every stage, padding."""
_OUTPUT_ROWS = 16
RUN_TIME_NUMBERS = [
    "first_head", "kv_head", "chunk", "chunks", "chunk_tokens", "items", "width", "place_bits",
]  # fmt: skip
"""Arguments of :meth:`PartialShape.work`, for whose values no kernel is compiled anew."""
OUTPUT_NUMBERS = [
    "chunk", "chunk_tokens", "tokens", "query_heads", "selecting_heads", "selecting_head",
    "first_head", "width",
]  # fmt: skip
"""Arguments of :meth:`PartialShape.output`, for whose values no kernel is compiled anew."""


@dataclass(frozen=True, kw_only=True)
class PartialShape:
    """How the entries of a selecting head's lists are computed.

    Attributes:
        tile: from the table of shapes.
        heads: query heads that are computed together.
        stages: tiles of queries that are copied ahead, with the one that is worked on.
        columns: keys of a tile that fits the block.
        column_tiles: such tiles that a program keeps.
        parts: programs that share a block, hence results of an entry and query head.
        width: places of a list.
    """

    tile: Tile
    heads: int
    head_dim: int
    block_size: int
    stages: int
    columns: int
    column_tiles: int
    parts: int
    width: int

    @classmethod
    def of(
        cls, q_THD: Tensor, selection: Selection, tile: Tile, heads: int, *, streamed: int
    ) -> PartialShape:
        """``streamed``: matrices that are gathered for a tile of queries."""
        head_dim, block_size = q_THD.shape[2], selection.kv_layout.block_size
        element_bytes = q_THD.element_size()
        columns, column_tiles = resident_columns(tile, block_size, head_dim, element_bytes)
        return cls(
            tile=tile,
            heads=heads,
            head_dim=head_dim,
            block_size=block_size,
            stages=fitted_stages(
                tile,
                columns * column_tiles,
                head_dim,
                element_bytes,
                streamed=streamed,
                shared_bytes=SHARED_BYTES[capability_of(q_THD.device)],
            ),
            columns=columns,
            column_tiles=column_tiles,
            parts=block_size // (columns * column_tiles),
            width=selection.indices_QCK.shape[2],
        )

    def lists(self, selection: Selection, head: int) -> ChunkedLists:
        """One selecting head's lists, cut so that a chunk's results fit the buffers."""
        return chunked_lists(
            selection.of_head(head, selection.counts_QC.shape[1]),
            entry_bytes=4 * self.parts * self.heads * (self.head_dim + 1),
            entries_per_tile=self.tile.rows // self.heads,
        )

    def buffer(self, lists: ChunkedLists, size: int, device: torch.device) -> Tensor:
        """float32, uninitialised, ``size`` numbers for every result of a chunk."""
        results = lists.chunk_tokens * self.width * self.parts * self.heads
        return torch.empty(results, size, dtype=torch.float32, device=device)

    def work(
        self, lists: ChunkedLists, selection: Selection, heads: HeadSlice, chunk: int
    ) -> tuple[Tensor | int, ...]:
        """Arguments of the kernels that compute a chunk's results: what, and for whom."""
        return (
            lists.entries.queries_E,
            lists.entries.bounds_J,
            lists.item_list_WI,
            lists.item_part_WI,
            selection.own_block_N,
            selection.query_layout.block_T,
            selection.query_layout.start_N,
            selection.kv_layout.start_N,
            selection.kv_layout.document_end_N,
            heads.first,
            heads.kv_head,
            chunk,
            lists.entries.chunks,
            lists.chunk_tokens,
            lists.items,
            self.width,
            lists.entries.place_bits,
        )

    def constants(self) -> dict[str, object]:
        """Compile-time arguments of those kernels; none depends on tokens or budgets."""
        return {
            "HEADS": self.heads,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(self.head_dim)),
            "BLOCK_SIZE": self.block_size,
            "TILE_ROWS": self.tile.rows,
            "TILE_COLUMNS": self.columns,
            "COLUMN_TILES": self.column_tiles,
            # Float32 means float32: its users are tests. Ignored for the half types.
            "PRECISION": "ieee",
            "num_warps": self.tile.warps,
            "num_stages": self.stages,
            "enable_fp_fusion": True,
        }

    def output_grid(self, lists: ChunkedLists) -> tuple[int]:
        """Programs of the kernels that add up a chunk's results."""
        return (triton.cdiv(lists.chunk_tokens * self.heads, _OUTPUT_ROWS),)

    def output(
        self,
        lists: ChunkedLists,
        heads: HeadSlice,
        chunk: int,
        tokens: int,
        query_heads: int,
        selecting_heads: int,
    ) -> tuple[int, ...]:
        """Arguments of those kernels."""
        return (
            chunk,
            lists.chunk_tokens,
            tokens,
            query_heads,
            selecting_heads,
            heads.selecting_head,
            heads.first,
            self.width,
        )

    def output_constants(self) -> dict[str, object]:
        """Compile-time arguments of those kernels."""
        return {
            "HEADS": self.heads,
            "PARTS": self.parts,
            "HEAD_DIM": self.head_dim,
            "BLOCK_D": triton.next_power_of_2(self.head_dim),
            "ROWS": _OUTPUT_ROWS,
            "enable_fp_fusion": True,
        }


def resident_columns(
    tile: Tile, block_size: int, head_dim: int, element_bytes: int
) -> tuple[int, int]:
    """Keys of a tile, and how many such tiles of a block's keys and values a program can keep."""
    columns = min(tile.columns, block_size)
    tile_bytes = 2 * columns * triton.next_power_of_2(head_dim) * element_bytes
    return columns, max(1, min(block_size // columns, tile.resident_bytes // tile_bytes))


def fitted_stages(
    tile: Tile,
    resident: int,
    head_dim: int,
    element_bytes: int,
    *,
    streamed: int,
    shared_bytes: int,
) -> int:
    """The tile's stages where shared memory has room for them, else 1.

    ``resident``: keys that a program keeps, with their values. Beside them lie the stages of every
    streamed matrix and half a tile of results, which Triton before 3.9 rearranges there for
    :func:`store_partial`. Two stages would copy no further ahead than one: of a turn of the loop,
    copies are started last and waited for first.
    """
    row_bytes = triton.next_power_of_2(head_dim) * element_bytes
    kept_bytes = 2 * resident * row_bytes + tile.rows * triton.next_power_of_2(head_dim) * 2
    staged_bytes = tile.stages * streamed * tile.rows * row_bytes
    return tile.stages if kept_bytes + staged_bytes + _OTHER_BYTES <= shared_bytes else 1


@triton.jit
def item_entries(bounds, item_part, block, chunk, chunks, items, item, ENTRIES: tl.constexpr):
    """An item's first entry, and how many it has."""
    bound = bounds + block.to(tl.int64) * chunks + chunk
    part = tl.load(item_part + chunk.to(tl.int64) * items + item)
    begin = tl.load(bound) + part * ENTRIES
    return begin, tl.minimum(tl.load(bound + 1) - begin, ENTRIES)


@triton.jit
def row_places(HEADS: tl.constexpr, TILE_ROWS: tl.constexpr):
    """Head and entry of a tile's rows; past all entries where heads do not fill the tile."""
    row_Y = tl.arange(0, TILE_ROWS)
    entry_Y = row_Y // HEADS
    return row_Y % HEADS, tl.where(entry_Y < TILE_ROWS // HEADS, entry_Y, 1 << 30)


@triton.jit
def own_prefix(entries, count, own_blocks, token_blocks, query_starts, block, length, place_bits,
               TOKENS: tl.constexpr):  # fmt: skip
    """Tiles at the head of a list that may hold tokens of the block itself, and the first of them.

    Readers rise and none comes before the block, so that its own tokens come first. Later ones lie
    a whole block behind the first, hence see all of it even where a tile mixes both.
    """
    first = tl.load(entries, mask=count > 0, other=0) >> place_bits
    query_block = tl.load(token_blocks + first)
    own = ((count > 0) & (tl.load(own_blocks + query_block) == block)).to(tl.int32)
    tiles = tl.minimum(tl.cdiv(length, TOKENS), tl.cdiv(count, TOKENS))
    return own * tiles, tl.load(query_starts + query_block)


@triton.jit
def resident_tiles(tiles, pointer, stride, start, length, first_column, HEAD_DIM: tl.constexpr,
                   BLOCK_D: tl.constexpr, TILE_COLUMNS: tl.constexpr,
                   COLUMN_TILES: tl.constexpr):  # fmt: skip
    """``tiles``, then consecutive tiles of a block's keys or values, with zeros past its end."""
    for tile in tl.static_range(COLUMN_TILES):
        slot_C = first_column + tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
        x_CD = load_rows(pointer, stride, start + slot_C, slot_C < length, True, HEAD_DIM,
                         BLOCK_D)  # fmt: skip
        tiles = tiles + (x_CD,)  # noqa: RUF005, for Triton knows no unpacking
    return tiles


@triton.jit
def store_partial(parts, result_YD, entry_Y, token_Y, valid_Y, head_Y, part, first_token, width,
                  place_bits, PARTS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                  BLOCK_D: tl.constexpr):  # fmt: skip
    """Store an entry's results; also says where: a number for every row.

    A chunk's buffer is bounded, so that places in it take 32 bits, which saves registers. Results
    go in halves, for compilers that rearrange a tile in shared memory before they store it.
    """
    place_Y = entry_Y & ((1 << place_bits) - 1)
    result_Y = ((token_Y - first_token).to(tl.int32) * width + place_Y) * PARTS + part
    result_Y = result_Y * HEADS + head_Y
    HALF_D: tl.constexpr = BLOCK_D // 2
    left_YD, right_YD = tl.split(
        tl.permute(tl.reshape(result_YD, (result_YD.shape[0], 2, HALF_D)), (0, 2, 1))
    )
    dim_D = tl.arange(0, HALF_D)
    address_YD = parts + result_Y[:, None] * HEAD_DIM + dim_D[None, :]
    tl.store(address_YD, left_YD, mask=valid_Y[:, None] & (dim_D < HEAD_DIM)[None, :])
    tl.store(address_YD + HALF_D, right_YD,
             mask=valid_Y[:, None] & (dim_D + HALF_D < HEAD_DIM)[None, :])  # fmt: skip
    return result_Y


@triton.jit
def output_rows(
    counts, chunk, chunk_tokens, tokens, query_heads, selecting_heads, selecting_head, first_head,
    width, HEADS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of a program that adds up: their places in the output, whether they exist, how many
    results each has, and the number of the first."""
    row_O = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    slot_O = (row_O // HEADS).to(tl.int64)
    token_O = chunk.to(tl.int64) * chunk_tokens + slot_O
    valid_O = (slot_O < chunk_tokens) & (token_O < tokens)
    count_O = tl.load(counts + token_O * selecting_heads + selecting_head, mask=valid_O, other=0)
    place_O = token_O * query_heads + first_head + row_O % HEADS
    return place_O, valid_O, count_O * PARTS, slot_O * width * PARTS * HEADS + row_O % HEADS
