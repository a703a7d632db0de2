# SPDX-License-Identifier: Apache-2.0
"""Layouts of rows that come without a carrier: one per micro-batch, not one per layer."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebalance_megatron.attention.layout import PackedLayout, packed_layout


@dataclass(frozen=True, kw_only=True)
class _Read:
    """Boundaries read from a tensor as it was in one version."""

    tensor: weakref.ref[Tensor]
    version: int
    boundaries: tuple[int, ...]


class LayoutCache:
    """The last row's boundaries and layout, shared by the layers of a model.

    All layers of a micro-batch get the same boundary tensor from Megatron, one after the other.
    Reading it makes the host wait for the device, so it is read anew only where it is another
    tensor, or was written to since.
    """

    def __init__(self) -> None:
        self._read: _Read | None = None
        self._key: object = None
        self._layout: PackedLayout | None = None

    def boundaries_of(self, cu_seqlens: Tensor) -> tuple[int, ...]:
        """The boundaries in a tensor on any device."""
        if cu_seqlens.is_inference():
            # Such tensors do not count what is written to them.
            return tuple(cu_seqlens.tolist())
        read = self._read
        if read is None or read.tensor() is not cu_seqlens or read.version != cu_seqlens._version:
            read = _Read(
                tensor=weakref.ref(cu_seqlens),
                version=cu_seqlens._version,
                boundaries=tuple(cu_seqlens.tolist()),
            )
            self._read = read
        return read.boundaries

    def layout(
        self, boundaries: tuple[int, ...], block_size: int, device: torch.device
    ) -> PackedLayout:
        """The layout of a row; see :func:`..attention.layout.packed_layout`."""
        key = (boundaries, block_size, device)
        if self._layout is None or self._key != key:
            self._layout, self._key = packed_layout(boundaries, block_size, device), key
        return self._layout
