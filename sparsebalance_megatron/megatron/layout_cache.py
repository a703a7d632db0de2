# SPDX-License-Identifier: Apache-2.0
"""Boundaries on a device are read once per micro-batch, although every layer asks for them."""

from __future__ import annotations

import weakref

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout


class LayoutCache:
    """The last packed sequence's boundaries and layout, shared by the layers of a model.

    All layers of a micro-batch get the same boundary tensor from Megatron, one after the other.
    Reading it makes the host wait for the device, so it is read anew only where it is another
    tensor, or was written to since.
    """

    def __init__(self) -> None:
        self._read: tuple[weakref.ref[Tensor], int, tuple[int, ...]] | None = None
        self._key: object = None
        self._layout: PackedLayout | None = None

    def boundaries_of(self, cu_seqlens: Tensor) -> tuple[int, ...]:
        """The boundaries in a tensor on any device."""
        if cu_seqlens.is_inference():
            # Such tensors do not count what is written to them.
            return tuple(cu_seqlens.tolist())
        if self._read is not None:
            tensor, version, boundaries = self._read
            if tensor() is cu_seqlens and version == cu_seqlens._version:
                return boundaries
        boundaries = tuple(cu_seqlens.tolist())
        self._read = weakref.ref(cu_seqlens), cu_seqlens._version, boundaries
        return boundaries

    def layout(
        self, boundaries: tuple[int, ...], block_size: int, device: torch.device
    ) -> PackedLayout:
        """The layout of a packed sequence; see :func:`..attention.layout.packed_layout`."""
        key = (boundaries, block_size, device)
        if self._layout is None or self._key != key:
            self._layout, self._key = packed_layout(boundaries, block_size, device), key
        return self._layout
