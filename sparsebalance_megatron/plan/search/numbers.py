# SPDX-License-Identifier: Apache-2.0
"""Numbers without a pattern, for searches that must find the same on every rank."""

from __future__ import annotations

import numpy as np


class Numbers:
    """A counter, mixed (splitmix64): the same numbers everywhere."""

    def __init__(self) -> None:
        self._drawn = 0

    def draw(self, count: int) -> np.ndarray:
        """So many, uint64."""
        mixed = np.arange(self._drawn + 1, self._drawn + count + 1, dtype=np.uint64)
        self._drawn += count
        mixed *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return np.asarray(mixed ^ (mixed >> np.uint64(31)))

    def below(self, limit: np.ndarray | int, count: int) -> np.ndarray:
        """So many from 0 to below the limit, int64."""
        drawn = self.draw(count) >> np.uint64(33)
        return np.asarray(drawn.astype(np.int64) % limit)
