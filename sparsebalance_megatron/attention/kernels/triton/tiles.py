# SPDX-License-Identifier: Apache-2.0
"""Tile shapes of the kernels: one table.

Chosen by GPU, head dim and element size alone, never by timing at run time: a choice that depends
on a clock would change the order of sums, hence the bits, from run to run.
``benchmarks/kernels.py`` measures alternatives.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

Capability = tuple[int, int]
"""An NVIDIA GPU's compute capability, major and minor."""
AMPERE: Capability = (8, 0)
HOPPER: Capability = (9, 0)
BLACKWELL: Capability = (10, 0)
BLACKWELL_ULTRA: Capability = (10, 3)
OF_99_KIB: tuple[Capability, ...] = ((8, 6), (8, 9), (12, 0), (12, 1))
"""GPUs for graphics and workstations: A40, L40S, RTX PRO 6000, GB10 and their like."""
SHARED_BYTES: dict[Capability, int] = {
    AMPERE: 163 << 10,
    HOPPER: 227 << 10,
    BLACKWELL: 227 << 10,
    BLACKWELL_ULTRA: 227 << 10,
    **dict.fromkeys(OF_99_KIB, 99 << 10),
}
"""Shared memory that one program may have (CUDA C++ programming guide, "Compute Capabilities"), of
the GPUs that the table has shapes for."""


class Tile(NamedTuple):
    """Shape of a kernel's inner product and how it is compiled.

    ``rows``: queries of one tile; ``columns``: keys of one tile. Both shrink to fit a block.
    """

    rows: int
    columns: int
    warps: int
    stages: int


class Tiles(NamedTuple):
    """One tile shape per kernel."""

    forward: Tile
    query_gradient: Tile
    key_gradient: Tile


# Of the shapes that fit a GPU's shared memory and registers under all Tritons from 3.4 to 3.9,
# those that keep copies of the next tiles in flight, hardly spill in the loop, and have the least
# instructions per product: for Hopper, by ``benchmarks/kernel_resources.py --candidates``, which
# lists them all; for GPUs of 99 KiB among a dozen. Elsewhere a shape is Hopper's where that fits.
# Each table is for the half types, by the largest head dim; rows, columns, warps and stages of the
# forward pass, of dq, of dk and dv.
_HOPPER = {
    64: Tiles(Tile(128, 128, 8, 3), Tile(128, 128, 8, 3), Tile(64, 128, 8, 3)),
    128: Tiles(Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    256: Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), Tile(32, 64, 8, 3)),
}
_AMPERE = _HOPPER | {
    256: Tiles(Tile(128, 32, 8, 3), Tile(64, 32, 4, 3), Tile(32, 64, 8, 3)),
}
_BLACKWELL = _HOPPER | {
    128: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    256: Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 2), Tile(32, 64, 8, 3)),
}
_IN_99_KIB = {
    64: Tiles(Tile(128, 64, 8, 3), Tile(128, 64, 8, 3), Tile(64, 128, 8, 3)),
    128: Tiles(Tile(128, 32, 8, 3), Tile(128, 32, 8, 3), Tile(32, 128, 8, 3)),
    256: Tiles(Tile(32, 32, 4, 3), Tile(32, 32, 4, 3), Tile(16, 32, 4, 3)),
}
_SMALL, _SMALLEST = Tile(32, 32, 4, 1), Tile(16, 16, 4, 1)
_FLOAT32 = Tiles(_SMALL, _SMALL, _SMALL)
_WIDE_FLOAT32_IN_99_KIB = Tiles(_SMALL, _SMALLEST, _SMALLEST)
_OF_HALF_TYPES = {
    AMPERE: _AMPERE,
    HOPPER: _HOPPER,
    BLACKWELL: _BLACKWELL,
    BLACKWELL_ULTRA: _BLACKWELL,
    **dict.fromkeys(OF_99_KIB, _IN_99_KIB),
}


@cache
def capability_of(device: torch.device) -> Capability:
    """A GPU's; Hopper's for the CPU, where kernels are interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else HOPPER


def tiles_of(k_TGD: Tensor, v_TGF: Tensor) -> Tiles:
    """The table's row for keys and values; of two head dims the larger one counts."""
    head_dim = max(k_TGD.shape[2], v_TGF.shape[2])
    return tiles_for(head_dim, k_TGD.element_size(), capability_of(k_TGD.device))


def tiles_for(head_dim: int, element_bytes: int, capability: Capability) -> Tiles:
    """The table's row for a head dim, a dtype's size and a GPU of ``SHARED_BYTES``."""
    if element_bytes <= 2:
        table = _OF_HALF_TYPES[capability]
        return next(tiles for largest, tiles in table.items() if head_dim <= largest)
    return _WIDE_FLOAT32_IN_99_KIB if head_dim > 128 and capability in OF_99_KIB else _FLOAT32
