# SPDX-License-Identifier: Apache-2.0
# mypy: disable-error-code="no-untyped-def"
"""From "which KV blocks a query block or token reads" to "what reads a KV block".

Four launches count the readers of every block, add the counts up and put every reader in its place.
Atomics add integers alone, so the order of every list is the same each time, and no buffer depends
on a value of the device, so the host never waits.

A *reader* is one list: that of a query block, or of a token and a head that selects. Those of one
KV head are numbered row by row, the lists of a row side by side.

Shape legend: U inverse lists (one per KV head and KV block, all KV blocks of a head side by side),
E entries (Q * C * K), J bounds of tiles of readers, list by list, I capacity for items, O lists of
a tile.
"""

from dataclasses import dataclass

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebalance_megatron.attention.selection import Selection

FEWEST_TILE_READERS = 128
"""Readers that a program puts into their places one after the other."""
MOST_BOUNDS = 1 << 25
"""Bounds, of 4 bytes each, for which tiles of readers are kept small."""
_PLACES = 32
_COUNTED_READERS = 32
_LISTS = 256


@dataclass(frozen=True, kw_only=True, eq=False)
class Readers:
    """Readers of every KV block in CSR form. Tensors are int32.

    Attributes:
        readers_E: by rising number in each list; undefined past the last bound.
        bounds_J: the tiles' first entries, list by list, and the end of the last: U * tiles + 1.
        readers: of a KV head; ``tile_readers`` of every tile but the last, which may have fewer.
        tiles: of a list.
    """

    readers_E: Tensor
    bounds_J: Tensor
    readers: int
    tile_readers: int
    tiles: int


def readers_of(selection: Selection, kv_heads: int) -> Readers:
    """All entries of a selection by (KV head, KV block), readers rising."""
    indices_QCK, counts_QC = selection.indices_QCK.contiguous(), selection.counts_QC.contiguous()
    rows, heads, width = indices_QCK.shape
    blocks, device = selection.kv_layout.blocks, indices_QCK.device
    shared, readers = heads // kv_heads, rows * (heads // kv_heads)
    tile_readers = FEWEST_TILE_READERS
    while kv_heads * blocks * -(-readers // tile_readers) > MOST_BOUNDS and tile_readers < readers:
        tile_readers *= 2
    tiles = -(-readers // tile_readers)
    # The count of a tile lies where its end will.
    left_J = torch.zeros(kv_heads * blocks * tiles + 1, dtype=torch.int32, device=device)
    numbers = (blocks, heads, shared, readers, tile_readers, tiles, width)
    with torch.cuda.device_of(indices_QCK):
        _count_kernel[triton.cdiv(readers, _COUNTED_READERS), kv_heads](
            *(indices_QCK, counts_QC, left_J, *numbers),
            READERS=_COUNTED_READERS,
            PLACES=_PLACES,
        )
        bounds_J = left_J.cumsum(0, dtype=torch.int32)
        readers_E = torch.empty(indices_QCK.numel(), dtype=torch.int32, device=device)
        _place_kernel[tiles, kv_heads](
            *(indices_QCK, counts_QC, left_J, bounds_J, readers_E, *numbers),
            PLACES=_PLACES,
            num_warps=1,
        )
    return Readers(
        readers_E=readers_E,
        bounds_J=bounds_J,
        readers=readers,
        tile_readers=tile_readers,
        tiles=tiles,
    )


@triton.jit(do_not_specialize=["blocks", "readers", "tile_readers", "tiles", "width"])
def _count_kernel(
    indices, counts, left, blocks, heads, shared, readers, tile_readers, tiles, width,
    READERS: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """Count the readers of every block, tile by tile."""
    reader_R = tl.program_id(0) * READERS + tl.arange(0, READERS)
    kv_head = tl.program_id(1)
    list_R = (reader_R // shared).to(tl.int64) * heads + kv_head * shared + reader_R % shared
    count_R = tl.load(counts + list_R, mask=reader_R < readers, other=0)
    for first in range(0, tl.max(count_R, 0), PLACES):
        place_K = first + tl.arange(0, PLACES)
        listed_RK = place_K[None, :] < count_R[:, None]
        block_RK = tl.load(indices + list_R[:, None] * width + place_K[None, :], mask=listed_RK,
                           other=0).to(tl.int64)  # fmt: skip
        slot_RK = (kv_head * blocks + block_RK) * tiles + (reader_R // tile_readers)[:, None]
        tl.atomic_add(left + slot_RK + 1, 1, mask=listed_RK, sem="relaxed")


@triton.jit(do_not_specialize=["blocks", "readers", "tile_readers", "tiles", "width"])
def _place_kernel(
    indices, counts, left, bounds, entries, blocks, heads, shared, readers, tile_readers, tiles,
    width, PLACES: tl.constexpr,
):  # fmt: skip
    """Put a tile's readers into their places, the last reader first.

    A list names a block once, so that no two lanes meet; from one reader to the next the barrier
    orders them.
    """
    tile, kv_head = tl.program_id(0), tl.program_id(1)
    first_reader = tile * tile_readers
    past_reader = tl.minimum(first_reader + tile_readers, readers)
    for step in range(0, past_reader - first_reader):
        reader = past_reader - 1 - step
        place = (reader // shared).to(tl.int64) * heads + kv_head * shared + reader % shared
        count = tl.load(counts + place)
        for first in range(0, count, PLACES):
            place_K = first + tl.arange(0, PLACES)
            listed_K = place_K < count
            block_K = tl.load(indices + place * width + place_K, mask=listed_K, other=0)
            slot_K = (kv_head * blocks + block_K.to(tl.int64)) * tiles + tile
            left_K = tl.load(left + slot_K + 1, mask=listed_K, other=1) - 1
            tl.store(left + slot_K + 1, left_K, mask=listed_K)
            begin_K = tl.load(bounds + slot_K, mask=listed_K, other=0)
            tl.store(entries + begin_K + left_K, reader, mask=listed_K)
        tl.debug_barrier()


@dataclass(frozen=True, kw_only=True, eq=False)
class InverseLists:
    """Readers of every KV block, and the items of work that their lists are cut into.

    An item is up to ``entries_per_item`` consecutive entries of one list. Items lie block by block,
    the heads of a block side by side, so that the blocks that most may read start first. Tensors
    are int32.

    Attributes:
        item_3I: an item's list, -1 past the last item; its place in that; where its result lies if
            the list is cut, else -1.
        list_2U: items of each list, at least 1; where the results of a cut list begin.
        cut_items: how many items of cut lists there can be at most.
    """

    entries: Readers
    item_3I: Tensor
    list_2U: Tensor
    entries_per_item: int
    cut_items: int


def inverse_lists(
    selection: Selection, kv_heads: int, *, wanted_items: int, most_cut_items: int
) -> InverseLists:
    """Invert a selection.

    Lists are cut into about ``wanted_items`` items, and in any case at four times the length that a
    full block's list has on average, so that a block that every query reads does not keep one
    program busy for long. Items of cut lists are ``most_cut_items`` at most, or longer.
    """
    entries = readers_of(selection, kv_heads)
    _, heads, width = selection.indices_QCK.shape
    lists, capacity = kv_heads * selection.kv_layout.blocks, heads * _entries(selection)
    # A short block has no readers but its own, so that its list is never cut.
    own_readers = selection.query_layout.block_size if selection.by_token else 1
    own_readers *= heads // kv_heads
    entries_per_item = min(4 * width * own_readers, -(-capacity // wanted_items))
    # A cut list of n entries has at most n / entries_per_item + 1 items, less than twice that.
    fewest = -(-2 * capacity // max(1, most_cut_items))
    entries_per_item = max(own_readers, entries_per_item, fewest)
    cut_items = 0
    if _longest(selection) * (heads // kv_heads) > entries_per_item:
        cut_items = 2 * capacity // entries_per_item
    items = _aligned(lists + cut_items)
    item_3I = torch.empty(3, items, dtype=torch.int32, device=entries.bounds_J.device)
    list_2U = torch.empty(2, _aligned(lists), dtype=torch.int32, device=entries.bounds_J.device)
    with torch.cuda.device_of(item_3I):
        _item_kernel[(1,)](
            *(entries.bounds_J, *item_3I, *list_2U),
            *(kv_heads, selection.kv_layout.blocks, entries.tiles, entries_per_item, items),
            LISTS=_LISTS,
        )
    return InverseLists(
        entries=entries,
        item_3I=item_3I,
        list_2U=list_2U,
        entries_per_item=entries_per_item,
        cut_items=cut_items,
    )


def _aligned(entries: int) -> int:
    """As many int32 as fill whole 128 bytes: kernels are compiled anew for other alignments."""
    return -(-entries // 32) * 32


@triton.jit(do_not_specialize=["heads", "blocks", "tiles", "entries_per_item", "items"])
def _item_kernel(
    bounds, item_list, item_part, item_slot, parts, first_slots, heads, blocks, tiles,
    entries_per_item, items, LISTS: tl.constexpr,
):  # fmt: skip
    """Cut all lists into items, in one program."""
    first_item, first_slot = 0, 0
    for first in range(0, heads * blocks, LISTS):
        number_O = first + tl.arange(0, LISTS)
        inside_O = number_O < heads * blocks
        list_O = (number_O % heads) * blocks + number_O // heads
        bound_O = bounds + list_O.to(tl.int64) * tiles
        begin_O = tl.load(bound_O, mask=inside_O, other=0)
        length_O = tl.load(bound_O + tiles, mask=inside_O, other=0) - begin_O
        parts_O = tl.maximum((length_O + entries_per_item - 1) // entries_per_item, 1)
        parts_O = tl.where(inside_O, parts_O, 0)
        cut_O = tl.where(parts_O > 1, parts_O, 0)
        item_O = first_item + tl.cumsum(parts_O, 0) - parts_O
        slot_O = first_slot + tl.cumsum(cut_O, 0) - cut_O
        tl.store(parts + list_O, parts_O, mask=inside_O)
        tl.store(first_slots + list_O, slot_O, mask=inside_O)
        for part in range(0, tl.max(parts_O, 0)):
            there_O = part < parts_O
            tl.store(item_list + item_O + part, list_O, mask=there_O)
            tl.store(item_part + item_O + part, tl.full([LISTS], 0, tl.int32) + part, mask=there_O)
            tl.store(item_slot + item_O + part, tl.where(parts_O > 1, slot_O + part, -1),
                     mask=there_O)  # fmt: skip
        first_item += tl.sum(parts_O, 0)
        first_slot += tl.sum(cut_O, 0)
    for first in range(first_item, items, LISTS):
        place_O = first + tl.arange(0, LISTS)
        tl.store(item_list + place_O, tl.full([LISTS], -1, tl.int32), mask=place_O < items)


def _longest(selection: Selection) -> int:
    """Most readers that a KV block can have."""
    layout = selection.query_layout
    if layout is not selection.kv_layout:
        return selection.selecting_rows
    return int(layout.grid.tokens_S.max()) if selection.by_token else layout.max_blocks


def _entries(selection: Selection) -> int:
    """Most entries that one head's lists can hold; in one sequence, none reads a later block."""
    width, layout = selection.indices_QCK.shape[2], selection.query_layout
    if layout is not selection.kv_layout:
        return selection.selecting_rows * min(width, selection.kv_layout.blocks)
    blocks_S, size = layout.grid.blocks_S, layout.block_size
    growing_S = np.minimum(blocks_S, width)
    entries_S = growing_S * (growing_S + 1) // 2 + (blocks_S - growing_S) * width
    if selection.by_token:
        missing_S = blocks_S * size - layout.grid.tokens_S
        entries_S = entries_S * size - missing_S * growing_S
    return int(entries_S.sum())
