# SPDX-License-Identifier: Apache-2.0
"""Scores as sums, which add up over rows and ranks.

Shape legend: X scored labels.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(kw_only=True)
class Tally:
    """Right answers, losses and labels, in all and by place."""

    edges: Sequence[int]
    right: np.ndarray = field(init=False)
    loss: np.ndarray = field(init=False)
    labels: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.right, self.loss, self.labels = (np.zeros(len(self.edges) - 1) for _ in range(3))

    def add(self, places_X: np.ndarray, right_X: np.ndarray, loss_X: np.ndarray) -> None:
        """Count labels.

        Raises:
            ValueError: a place lies outside the edges.
        """
        group_X = np.searchsorted(self.edges, places_X, side="right") - 1
        if len(group_X) and not 0 <= group_X.min() <= group_X.max() < len(self.labels):
            raise ValueError(
                f"places {places_X.min()} to {places_X.max()} outside of edges {self.edges}"
            )
        for total, weights_X in ((self.right, right_X), (self.loss, loss_X), (self.labels, None)):
            total += np.bincount(group_X, weights_X, minlength=len(total))

    def sums(self) -> dict[str, list[float]]:
        """For JSON; those of several ranks are added entry by entry."""
        return {name: getattr(self, name).tolist() for name in ("right", "loss", "labels")}


def added(parts: Sequence[Mapping[str, list[float]]]) -> dict[str, list[float]]:
    """Sums of ranks, added."""
    return {name: np.sum([part[name] for part in parts], axis=0).tolist() for name in parts[0]}
