# SPDX-License-Identifier: Apache-2.0
"""Which samples of consecutive global batches share a step: an exchange within a window.

A step takes at least as long as its longest sample on one rank. So steps without long samples are
faster, and others have to hold more of them. Steps keep their number of samples, and as far as
that allows they get equally many tokens: per-token losses weigh a token by those of its step.

1. The window's samples are sorted by length, longest first; equal ones stay in order of arrival.
2. Step w takes the w-th share of the longest.
3. Every other sample, longest first, goes to the step with fewest tokens that has a place.
4. Within a step samples keep their order of arrival. The order of the steps is drawn.

Nothing but lengths, the seed and the window's place decides: no cost, and nothing learnt.

Shape legend: W steps of a window, I samples of a step.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparsebalance_megatron.config import SparseBalanceConfig

_DRAWS = 73
"""Tells the draws of windows from others of the same seed."""


def window_places(
    lengths_S: np.ndarray, steps: int, seed: int, *, share: float = 0.25, first_sample: int = 0
) -> np.ndarray:
    """Deal the samples of a window to its steps.

    Args:
        lengths_S: tokens of the samples of so many consecutive global batches of equal size.
        share: of a step's samples that are neighbours by length; at least one is.
        first_sample: samples before the window, which the order of its steps is drawn from.
        seed: of the order of samples.

    Returns:
        [W, I] places of each step's samples in the window: every place once, rising in a step.
    """
    size = len(lengths_S) // steps
    if steps == 1:
        return np.arange(size)[None]
    by_length = np.argsort(-np.asarray(lengths_S), kind="stable")
    gathered = max(1, int(size * share))
    members = by_length[: steps * gathered].reshape(steps, gathered).tolist()
    emptiest = [(int(lengths_S[own].sum()), step) for step, own in enumerate(members)]
    if gathered < size:
        heapq.heapify(emptiest)
        for place in by_length[steps * gathered :].tolist():
            tokens, step = emptiest[0]
            members[step].append(place)
            if len(members[step]) < size:
                heapq.heapreplace(emptiest, (tokens + int(lengths_S[place]), step))
            else:
                heapq.heappop(emptiest)
    drawn = np.random.Philox(np.random.SeedSequence([seed, first_sample, _DRAWS])).random_raw(steps)
    return np.sort(members, axis=1)[np.argsort(drawn, kind="stable")]


class Windows(NamedTuple):
    """An exchange of samples within windows of so many steps; see :func:`window_places`."""

    steps: int
    share: float
    seed: int

    @classmethod
    def of(cls, config: SparseBalanceConfig, seed: int) -> "Windows":
        """Those that were asked for."""
        return cls(config.window, config.window_share, seed)

    def dealt(self, batches: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Lengths by step, from those in order of arrival, window by window; the last may be of
        fewer steps."""
        if self.steps == 1:
            return tuple(map(tuple, batches))
        found: list[tuple[int, ...]] = []
        for first in range(0, len(batches), self.steps):
            lengths_S = np.concatenate(batches[first : first + self.steps])
            steps = min(self.steps, len(batches) - first)
            before = first * len(batches[0])
            places_WI = window_places(
                lengths_S, steps, self.seed, share=self.share, first_sample=before
            )
            found += map(tuple, lengths_S[places_WI].tolist())
        return tuple(found)
