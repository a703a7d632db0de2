# SPDX-License-Identifier: Apache-2.0
"""The variants that are compared, and which of them trains in which step."""

from collections.abc import Sequence
from dataclasses import dataclass

from sparsebalance_megatron.config import Batching

WARM_UP_BATCHES = 4
"""Warm-up of every variant. Planned ahead, a batch knows what was observed up to the last but one:
budgets are tuned from the third on, costs corrected from the fifth on."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a step. The names are those of ``SparseBalanceConfig``."""

    name: str
    label: str
    batching: Batching
    tuning: str
    dense: bool = False
    """Dense attention in all layers instead of block-sparse."""
    segments: bool = False
    """Micro-batches may pass the pipeline in segments; for layouts that may cut them."""
    shared: bool = False
    """Ranks may share micro-batches; for layouts whose limit of cp_size is above 1."""
    window: int = 1
    """Steps within which samples change places, a half of a step gathered by length."""


DENSE, EXACT, FIXED, PAPER = "dense", "exact", "fixed", "paper"
EXACT_SHARED, EXACT_WINDOW = "exact-shared", "exact-window"
OURS = "ours"
OURS_SEGMENTS = "ours-segments"

VARIANTS = (
    Variant(
        name=DENSE,
        label="dense attention, order of arrival",
        batching="arrival",
        tuning="off",
        dense=True,
    ),
    Variant(
        name=EXACT,
        label="exact: dense attention, our placement",
        batching="makespan",
        tuning="off",
        dense=True,
    ),
    Variant(name=FIXED, label="fixed budget, order of arrival", batching="arrival", tuning="off"),
    Variant(name="length", label="balanced by tokens", batching="length", tuning="off"),
    Variant(name="latency", label="balanced by latency (SAB)", batching="latency", tuning="off"),
    Variant(name="makespan", label="balanced by makespan", batching="makespan", tuning="off"),
    Variant(
        name=PAPER,
        label="the paper: SAB, tuned to the mean",
        batching="latency",
        tuning="anchor",
    ),
    Variant(
        name=OURS,
        label="ours (the default)",
        batching="makespan",
        tuning="raise",
    ),
)
"""What a run compares unless told otherwise."""

SEGMENTS = Variant(
    name=OURS_SEGMENTS,
    label="ours, micro-batches in segments",
    batching="makespan",
    tuning="raise",
    segments=True,
)
SHARED = Variant(
    name=EXACT_SHARED,
    label="exact, micro-batches that ranks may share",
    batching="makespan",
    tuning="off",
    dense=True,
    shared=True,
)
WINDOW = Variant(
    name=EXACT_WINDOW,
    label="exact, samples exchanged within 4 steps",
    batching="makespan",
    tuning="off",
    dense=True,
    window=4,
)
ALL_VARIANTS = (*VARIANTS, SEGMENTS, SHARED, WINDOW)
WITH_SEGMENTS = (FIXED, OURS, OURS_SEGMENTS)
"""What a run compares whose micro-batches may be cut."""
WITH_SHARED = (DENSE, EXACT, EXACT_SHARED)
"""What a run compares whose ranks may share micro-batches."""
WITH_WINDOWS = (DENSE, EXACT, EXACT_WINDOW)
"""What a run compares whose ranks have few samples a step."""
IN_LOCKSTEP = (DENSE, EXACT, FIXED, PAPER, OURS)
"""What a run compares whose ranks wait for one another in every layer."""


@dataclass(frozen=True)
class StepOrder:
    """Which global batch and which variant every step of a run trains.

    Consecutive steps train the same global batch under every variant, so that what disturbs the
    machine disturbs all. Their order follows a Williams design: over as many batches as there are
    variants (twice as many if their number is odd) every variant runs in every place equally often
    and follows every other equally often within a batch.
    """

    variants: int
    batches: int

    @property
    def steps(self) -> int:
        return self.variants * self.batches

    def batch(self, step: int) -> int:
        return step // self.variants

    def variant(self, step: int) -> int:
        """Index of the variant that runs in ``step``."""
        return self._row(self.batch(step))[step % self.variants]

    def _row(self, batch: int) -> Sequence[int]:
        zigzag = [(k + 1) // 2 if k % 2 else -(k // 2) for k in range(self.variants)]
        row = [(place + batch) % self.variants for place in zigzag]
        turned = self.variants % 2 == 1 and batch // self.variants % 2 == 1
        return row[::-1] if turned else row
