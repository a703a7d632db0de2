# SPDX-License-Identifier: Apache-2.0
"""Rates at which operations are counted where nothing was measured, with their sources."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from sparsebalance_megatron.config import CountedDevice


class CountedRates(NamedTuple):
    """``flops_per_ms``: dense bfloat16 products. ``memory_gib``: what a driver shows as total."""

    flops_per_ms: float
    memory_gib: float


DEVICES: Mapping[CountedDevice, CountedRates] = {
    "a100": CountedRates(312e9, 80.0),
    "h100": CountedRates(989e9, 80.0),
    "h200": CountedRates(989e9, 140.0),
    "b200": CountedRates(2250e9, 179.0),
}
"""NVIDIA's data sheets. An H200 multiplies as fast as an H100 and has more memory."""


def memory_gib(device: str) -> float | None:
    """Memory of a device by the name that it gives itself; None where that names none of these.

    >>> memory_gib("NVIDIA H100 80GB HBM3")
    80.0
    """
    words = device.lower().replace("-", " ").split()
    return next((rates.memory_gib for name, rates in DEVICES.items() if name in words), None)


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """Shares of a device's peak that products reach, forward and backward together.

    Attributes:
        dense: dense attention. FlashAttention-3 reaches up to 0.75 forward on an H100
            (arXiv:2407.08608), FlashAttention-2 0.5 to 0.73 on an A100 (arXiv:2307.08691); backward
            is slower.
        sparse: block-sparse attention and its router. Measured at 65,536 tokens and budget 32, head
            dim 128 (research/kernels.md): 0.13 where every token has lists of its own, on an H200.
        linear: projections, dense MLPs, shared experts and the head. Assumed; it leaves room for
            norms and activations, which are not counted.
        experts: products of routed experts, which are small. Assumed.
    """

    dense: float = 0.6
    sparse: float = 0.13
    linear: float = 0.5
    experts: float = 0.4

    def __str__(self) -> str:
        return (
            f"dense attention {self.dense:.0%}, sparse {self.sparse:.0%}, linear "
            f"{self.linear:.0%}, experts {self.experts:.0%} of peak"
        )


DEFAULT_EFFICIENCY = Efficiency()
OF_BLOCK_LISTS = Efficiency(sparse=0.35)
"""Where queries of a block share a list: 0.34 to 0.39 on an H100, without the router."""


def selection_efficiency(selection: str) -> Efficiency:
    """Shares of the peak that are counted for a selection; a package's own counts as by token."""
    by_block = selection in ("previous-block", "vertical-slash", "vertical-slash-last-queries")
    return OF_BLOCK_LISTS if by_block else DEFAULT_EFFICIENCY
