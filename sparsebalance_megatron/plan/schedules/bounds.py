# SPDX-License-Identifier: Apache-2.0
"""Lower bounds on a step's time, and samples that no placement can hide.

Shape legend: P pipeline stages, S samples of a global batch, M micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Lower bounds in ms on the time of a step; the largest one counts.

    ``stage_ms``, ``mean_chain_ms``, ``mixed_ms``: of all work together. ``long_ms``: because of the
    longer samples. ``chain_ms_S``: because of one sample. ``contradicted_ms``: because a step that
    ended by then would leave samples no widths at which it could.
    """

    stage_ms: float
    mean_chain_ms: float
    mixed_ms: float
    long_ms: float
    chain_ms_S: np.ndarray
    contradicted_ms: float

    @property
    def bound_ms(self) -> float:
        alone_ms = float(self.chain_ms_S.max())
        return max(self.together_ms, self.long_ms, alone_ms, self.contradicted_ms)

    @property
    def together_ms(self) -> float:
        """Because of all work together, however it is cut up."""
        return max(self.stage_ms, self.mean_chain_ms, self.mixed_ms)

    @property
    def unhideable_S(self) -> np.ndarray:
        """Which ones alone keep the step longer than all work together has to.

        No placement hides such a sample; a smaller budget, a shorter sample or context parallelism
        does. With P equal stages and M micro-batches of mean time mu, the stage bound is
        (M + P - 1) mu and the chain of a micro-batch of time X mu is at least P X mu: it is
        certainly unhideable beyond X = (M + P - 1) / P, whatever the order and the rank.
        """
        return self.chain_ms_S > self.together_ms


def unhideable_limit(stages: int, micro_batches: int) -> float:
    """X* = (M + P - 1) / P: largest over mean micro-batch above which balance cannot be reached.

    *Proof sketch.* All P stages of micro-batch i run one after the other, forward then backward,
    so T >= P X mu. Perfect balance takes (M + P - 1) mu: stage 0 works M mu, and the first forward
    to reach the last stage and the last backward to return from it add P - 1 more. P X > M + P - 1
    contradicts T = (M + P - 1) mu. The proof uses neither order nor rank, hence no placement helps.
    """
    return (micro_batches + stages - 1) / stages
