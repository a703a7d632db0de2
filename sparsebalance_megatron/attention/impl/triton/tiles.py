# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the kernels: one table.

Chosen by head dim and element size alone, never by timing at run time: a choice that depends on a
clock would change the order of sums, hence the bits, from run to run. ``benchmarks/kernels.py``
measures alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED_BYTES = 227 << 10
"""Shared memory that one program may have on Hopper."""


@dataclass(frozen=True, kw_only=True)
class Tile:
    """Shape of a kernel's inner product and how it is compiled.

    ``rows``: queries of one tile; ``columns``: keys of one tile. Both shrink to fit a block.
    ``descriptors``: tiles of past blocks are copied by Hopper's tensor memory accelerator, not by
    address; of the forward kernel for selections by query block alone.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    descriptors: bool = False


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile shape per kernel."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


# For Hopper: of the shapes that fit its shared memory and 64 K registers under all Tritons from 3.4
# to 3.9, those that keep copies of the next tiles in flight, hardly spill in the loop, and have the
# least instructions per product. ``benchmarks/kernel_resources.py --candidates`` lists them all.
_HALF_UP_TO_64 = Tiles(
    forward=Tile(rows=128, columns=128, warps=8, stages=3),
    query_gradient=Tile(rows=128, columns=128, warps=8, stages=3),
    key_gradient=Tile(rows=64, columns=128, warps=8, stages=3),
)
_HALF_UP_TO_128 = Tiles(
    forward=Tile(rows=128, columns=128, warps=8, stages=3),
    query_gradient=Tile(rows=128, columns=64, warps=8, stages=3),
    key_gradient=Tile(rows=64, columns=128, warps=8, stages=3),
)
_HALF_256 = Tiles(
    forward=Tile(rows=128, columns=32, warps=8, stages=3),
    query_gradient=Tile(rows=128, columns=32, warps=8, stages=3),
    key_gradient=Tile(rows=32, columns=64, warps=8, stages=3),
)
_FLOAT32 = Tiles(
    forward=Tile(rows=32, columns=32, warps=4, stages=1),
    query_gradient=Tile(rows=32, columns=32, warps=4, stages=1),
    key_gradient=Tile(rows=32, columns=32, warps=4, stages=1),
)

# For selections by token: rows are gathered queries, columns keys that stay on the chip. Stages are
# those of a tile that leaves them room (``token_partials.fitted_stages``).
_TOKEN_HALF_UP_TO_128 = Tiles(
    forward=Tile(rows=128, columns=256, warps=8, stages=3),
    query_gradient=Tile(rows=128, columns=128, warps=8, stages=3),
    key_gradient=Tile(rows=64, columns=128, warps=8, stages=3),
)
_TOKEN_HALF_256 = Tiles(
    forward=Tile(rows=128, columns=128, warps=8, stages=3),
    query_gradient=Tile(rows=64, columns=128, warps=4, stages=3),
    key_gradient=Tile(rows=32, columns=64, warps=8, stages=3),
)


def tiles_for(head_dim: int, element_bytes: int) -> Tiles:
    """The table's row for a head dim and a dtype's size."""
    if element_bytes > 2:
        return _FLOAT32
    if head_dim <= 64:
        return _HALF_UP_TO_64
    return _HALF_UP_TO_128 if head_dim <= 128 else _HALF_256


def token_tiles_for(head_dim: int, element_bytes: int) -> Tiles:
    """The same for selections by token."""
    if element_bytes > 2:
        return _FLOAT32
    return _TOKEN_HALF_UP_TO_128 if head_dim <= 128 else _TOKEN_HALF_256
