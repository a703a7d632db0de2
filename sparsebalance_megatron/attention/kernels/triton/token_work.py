# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""The work of selections by token: whose lists are inverted together, and launches over them.

Every entry of a list has a place of its own for the result of every query head, by token, place in
the list, part of the block where a program does not keep all of it, and head. These partial results
lie in one buffer of bounded size, which the next launch uses again: a launch computes those of some
heads, or, where one head has too many, of a chunk of its tokens.

A *unit* is the query heads that are computed together: some or all of those that share a list.

Shape legend: T tokens of the packed sequence, H query heads, G KV heads, D head dim, C heads that
select, K places of a list, W chunks of tokens, I capacity for items; in kernels Y query rows of a
tile (token by token, heads side by side), C columns (keys) of a tile, O rows of output.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.kernels.triton.device_functions import (
    load_rows,
    tile_constants,
)
from sparsebalance_megatron.attention.kernels.triton.index import (
    SortedEntries,
    item_table,
    sorted_entries,
)
from sparsebalance_megatron.attention.kernels.triton.tiles import SHARED_BYTES, Tile, capability_of
from sparsebalance_megatron.attention.selection import Selection

PARTIAL_BYTES = 260 << 20
"""Most bytes of a launch's partial results, unless those of a single token are more: those of two
heads of dim 128 at 8,192 tokens that read 32 blocks."""
SORTED_ENTRIES = 1 << 23
"""Entries of lists that are sorted at once, unless one head has more: 32 heads with 32 places at
8,192 tokens. Sorting takes about 40 bytes an entry for a moment."""
TILES_PER_ITEM = 8
"""Over these tiles of queries a program keeps its keys and values, which take as long to fetch as
the queries of four tiles."""
_OTHER_BYTES = 3 << 10
"""Shared memory besides matrices: LSE and delta of every stage, padding."""
_OUTPUT_ROWS = 16
STREAM_NUMBERS = [
    "first_unit", "first_head", "group", "chunk", "chunks", "chunk_tokens", "lists", "items",
    "blocks", "width", "place_bits",
]  # fmt: skip
"""Arguments of :meth:`TokenWork.stream_arguments`, for whose values no kernel is compiled anew."""
OUTPUT_NUMBERS = [
    "chunk", "chunk_tokens", "tokens", "query_heads", "lists", "first_head", "first_unit", "width"
]  # fmt: skip
"""Arguments of :meth:`TokenWork.output_arguments`, for whose values no kernel is compiled anew."""


@dataclass(frozen=True, kw_only=True)
class HeadBatch:
    """Selecting heads whose lists are inverted together: those of some KV heads, or some of one's.

    Attributes:
        selection: their lists.
        query_heads, kv_heads: whose queries, keys and values they read.
        begins, ends: whether they are the first, and the last, of their KV heads.
    """

    selection: Selection
    query_heads: slice
    kv_heads: slice
    begins: bool
    ends: bool


def head_batches(selection: Selection, query_heads: int, kv_heads: int) -> Iterator[HeadBatch]:
    """All selecting heads, as many at once as ``SORTED_ENTRIES`` allows."""
    rows, selecting, width = selection.indices_QCK.shape
    group = selecting // kv_heads
    numbers = [n for n in range(1, kv_heads + 1) if kv_heads % n == 0]
    numbers += [kv_heads * n for n in range(2, group + 1) if group % n == 0]
    fitting = (n for n in numbers if selecting // n * rows * width <= SORTED_ENTRIES)
    batches = next(fitting, selecting)
    for batch in range(batches):
        # Of one KV head there may be several batches.
        begin, end = batch * kv_heads // batches, -(-(batch + 1) * kv_heads // batches)
        heads = query_heads // batches
        yield HeadBatch(
            selection=selection.of_head(batch, batches),
            query_heads=slice(batch * heads, (batch + 1) * heads),
            kv_heads=slice(begin, end),
            begins=batch * kv_heads % batches == 0,
            ends=(batch + 1) * kv_heads % batches == 0,
        )


def unit_heads(selection: Selection, query_heads: int, most: int) -> int:
    """Query heads of a unit, at most ``most``: all units of a selection have as many."""
    shared = query_heads // selection.counts_QC.shape[1]
    return max(n for n in range(1, min(shared, most) + 1) if shared % n == 0)


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenWork:
    """How a batch's partial results are computed.

    Attributes:
        batch: the heads.
        tile: from the table of shapes.
        heads: query heads of a unit.
        group: query heads of a KV head.
        columns: keys of a tile that fits the block.
        column_tiles: such tiles that a program keeps.
        stages: tiles of queries that are copied ahead, with the one that is worked on.
        entries: the lists, inverted.
        chunk_tokens: tokens of every chunk but the last, which may have fewer.
        chunk_units: units of every launch but the last, which may have fewer.
        item_entries: an item is up to as many entries of one list that lie in one chunk.
        item_list_WCI: an item's KV block, -1 past the last item of the chunk and head; int32.
        item_part_WCI: an item's place in its list and chunk; int32.
    """

    batch: HeadBatch
    tile: Tile
    heads: int
    group: int
    head_dim: int
    columns: int
    column_tiles: int
    stages: int
    entries: SortedEntries
    chunk_tokens: int
    chunk_units: int
    item_entries: int
    item_list_WCI: Tensor
    item_part_WCI: Tensor

    @classmethod
    def of(
        cls,
        q_THD: Tensor,
        kv_heads: int,
        batch: HeadBatch,
        tile: Tile,
        heads: int,
        *,
        streamed: int,
    ) -> TokenWork:
        """Invert a batch's lists and cut them.

        ``streamed``: matrices that are gathered for a tile of queries.
        """
        selection, (_, query_heads, head_dim) = batch.selection, q_THD.shape
        tokens, selecting, width = selection.indices_QCK.shape
        blocks, block_size = selection.kv_layout.blocks, selection.kv_layout.block_size
        element_bytes = q_THD.element_size()
        columns, column_tiles = resident_columns(tile, block_size, head_dim, element_bytes)
        parts = block_size // (columns * column_tiles)
        fitting = max(1, PARTIAL_BYTES // (4 * parts * heads * (head_dim + 1) * width))
        chunks = -(-tokens // fitting)
        chunk_tokens = -(-tokens // chunks)
        entries = sorted_entries(selection, chunk_rows=chunk_tokens)
        item_entries = TILES_PER_ITEM * (tile.rows // heads)
        lengths_WCN = entries.bounds_J.diff().view(selecting, blocks, entries.chunks).movedim(2, 0)
        items = item_table(
            lengths_WCN.flatten(0, 1),
            chunk_tokens * width // item_entries + blocks,
            item_entries,
        )
        shape = entries.chunks, selecting, -1
        return cls(
            batch=batch,
            tile=tile,
            heads=heads,
            group=query_heads // kv_heads,
            head_dim=head_dim,
            columns=columns,
            column_tiles=column_tiles,
            stages=fitted_stages(
                tile,
                columns * column_tiles,
                head_dim,
                element_bytes,
                streamed=streamed,
                shared_bytes=SHARED_BYTES[capability_of(q_THD.device)],
            ),
            entries=entries,
            chunk_tokens=chunk_tokens,
            chunk_units=max(1, fitting // tokens),
            item_entries=item_entries,
            item_list_WCI=items.list_FI.masked_fill_(items.missing_FI, -1).int().view(shape),
            item_part_WCI=items.part_FI.int().view(shape),
        )

    @property
    def units(self) -> int:
        """Units of the batch."""
        return (self.batch.query_heads.stop - self.batch.query_heads.start) // self.heads

    @property
    def list_units(self) -> int:
        """Units that share a list."""
        return self.units // self.batch.selection.counts_QC.shape[1]

    @property
    def parts(self) -> int:
        """Programs that share a block, hence results of an entry and query head."""
        return self.batch.selection.kv_layout.block_size // (self.columns * self.column_tiles)

    @property
    def width(self) -> int:
        """Places of a list."""
        return self.batch.selection.indices_QCK.shape[2]

    def launches(self) -> Iterator[tuple[range, int]]:
        """Units and chunk of every launch."""
        for first in range(0, self.units, self.chunk_units):
            for chunk in range(self.entries.chunks):
                yield range(first, min(first + self.chunk_units, self.units)), chunk

    def buffer(self, size: int, device: torch.device) -> Tensor:
        """float32, uninitialised, ``size`` numbers for every result of a launch."""
        units = min(self.chunk_units, self.units)
        results = units * self.chunk_tokens * self.width * self.parts * self.heads
        return torch.empty(results, size, dtype=torch.float32, device=device)

    def stream_grid(self, units: range) -> tuple[int, int]:
        """Programs of the kernel that computes a launch's results."""
        return self.item_list_WCI.shape[2] * self.parts, len(units)

    def stream_arguments(self, units: range, chunk: int) -> tuple[Tensor | int, ...]:
        """Arguments of that kernel: what, and for whom."""
        selection = self.batch.selection
        return (
            self.entries.queries_E,
            self.entries.bounds_J,
            self.item_list_WCI,
            self.item_part_WCI,
            selection.own_block_N,
            selection.query_layout.block_T,
            selection.query_layout.start_N,
            selection.kv_layout.start_N,
            selection.kv_layout.document_end_N,
            units.start,
            self.batch.query_heads.start,
            self.group,
            chunk,
            self.entries.chunks,
            self.chunk_tokens,
            *self.item_list_WCI.shape[1:],
            selection.kv_layout.blocks,
            self.width,
            self.entries.place_bits,
        )

    def stream_constants(self, q_THD: Tensor) -> dict[str, object]:
        """Compile-time arguments of that kernel; none depends on tokens or budgets."""
        block_size = self.batch.selection.kv_layout.block_size
        return tile_constants(q_THD, block_size, self.tile.rows, self.tile) | {
            "HEADS": self.heads,
            "LIST_UNITS": self.list_units,
            "ITEM_ENTRIES": self.item_entries,
            "TILE_COLUMNS": self.columns,
            "COLUMN_TILES": self.column_tiles,
            "num_stages": self.stages,
        }

    def output_grid(self, units: range) -> tuple[int, int]:
        """Programs of the kernels that add up a launch's results."""
        return triton.cdiv(self.chunk_tokens * self.heads, _OUTPUT_ROWS), len(units)

    def output_arguments(self, units: range, chunk: int, query_heads: int) -> tuple[int, ...]:
        """Arguments of those kernels."""
        return (
            chunk,
            self.chunk_tokens,
            self.batch.selection.query_layout.tokens,
            query_heads,
            self.batch.selection.counts_QC.shape[1],
            self.batch.query_heads.start,
            units.start,
            self.width,
        )

    def output_constants(self) -> dict[str, object]:
        """Compile-time arguments of those kernels."""
        return {
            "HEADS": self.heads,
            "LIST_UNITS": self.list_units,
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
def store_partial(parts, result_YD, entry_Y, slot_Y, valid_Y, head_Y, part, width, place_bits,
                  PARTS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr,
                  BLOCK_D: tl.constexpr):  # fmt: skip
    """Store an entry's results; also says where: a number for every row.

    A launch's buffer is bounded, so that places in it take 32 bits, which saves registers. Results
    go in halves, for compilers that rearrange a tile in shared memory before they store it.
    """
    place_Y = entry_Y & ((1 << place_bits) - 1)
    result_Y = (slot_Y * width + place_Y) * PARTS + part
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
    counts, chunk, chunk_tokens, tokens, query_heads, lists, first_head, first_unit, width,
    HEADS: tl.constexpr, LIST_UNITS: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Rows of a program that adds up: their places in the output, whether they exist, how many
    results each has, and the number of the first."""
    row_O = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = first_unit + tl.program_id(1)
    slot_O = (row_O // HEADS).to(tl.int64)
    token_O = chunk.to(tl.int64) * chunk_tokens + slot_O
    valid_O = (slot_O < chunk_tokens) & (token_O < tokens)
    count_O = tl.load(counts + token_O * lists + unit // LIST_UNITS, mask=valid_O, other=0)
    place_O = token_O * query_heads + first_head + unit * HEADS + row_O % HEADS
    slot_O += tl.program_id(1).to(tl.int64) * chunk_tokens
    return place_O, valid_O, count_O * PARTS, slot_O * width * PARTS * HEADS + row_O % HEADS
