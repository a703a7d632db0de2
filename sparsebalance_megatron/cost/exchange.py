# SPDX-License-Identifier: Apache-2.0
"""What it takes that several ranks share one row: keys and values travel, work splits unevenly."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from sparsebalance_megatron.cost.parts import Direction

NOMINAL_GIGABYTES_PER_SECOND = 50.0
"""That a rank receives, where nothing was measured: about one 400 Gb/s network card each."""
TRANSFERS: Mapping[Direction, float] = {Direction.FORWARD: 1.0, Direction.BACKWARD: 2.0}
"""A forward gathers keys and values. A backward gathers them again and scatters their gradients."""
_BYTES_PER_MS_AND_GIGABYTE = 1e6


def ms_per_byte(gigabytes_per_second: float) -> float:
    """The time that a byte takes at a bandwidth."""
    return 1.0 / (gigabytes_per_second * _BYTES_PER_MS_AND_GIGABYTE)


def received_bytes(tokens: float, width: int, bytes_per_token: float) -> float:
    """Bytes that each of ``width`` ranks receives of a row of so many tokens, gathering it once."""
    return tokens * bytes_per_token * (width - 1) / width


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """Costs of a slot that several ranks share. Nothing of it is taken to overlap with work.

    Attributes:
        bytes_per_token: keys and values of a token in a layer, on one tensor-parallel rank.
        ms_per_byte: of what a rank receives.
        loss: by which share the work of a rank exceeds an even split of the whole.
    """

    bytes_per_token: float = 0.0
    ms_per_byte: float = ms_per_byte(NOMINAL_GIGABYTES_PER_SECOND)
    loss: float = 0.05

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not (math.isfinite(value) and value >= 0.0):
                raise ValueError(f"exchange: {name} is {value}, must be finite and at least 0")

    def ms_per_token(self, direction: Direction) -> float:
        """Ms per token and layer of a slot so wide that ranks receive all of it.

        One of width W takes (W - 1) / W of that.
        """
        return TRANSFERS[direction] * self.bytes_per_token * self.ms_per_byte

    def share(self, width: int) -> float:
        """Of the work of a slot, what each of its ranks does."""
        return 1.0 if width == 1 else (1.0 + self.loss) / width
