# SPDX-License-Identifier: Apache-2.0
"""Which training samples every step gets.

Shape legend: S samples of a window.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sparsebalance_megatron.plan.batch_sizes import BatchSizes
from sparsebalance_megatron.plan.budgets.price import horizon_steps
from sparsebalance_megatron.plan.step_plan import PlanError

_RUN_PER_RANK = 2
_HEAVIEST_OVER_MEAN = 2.0


class SampleLengths(Protocol):
    """An endless order of training samples, and their lengths in tokens."""

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Sample numbers at the places ``first`` to ``first + size`` of the order."""

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of every sample."""


@dataclass(kw_only=True)
class StepSamples:
    """Samples of steps, in order of arrival or exchanged within windows.

    With a window the samples of ``window`` consecutive global batches are dealt out anew by
    predicted cost. ``sample_ms`` must never change, so that a resumed run deals the same way
    without any saved state.

    Attributes:
        index: the training samples and their lengths.
        batch_sizes: samples per step; a window needs steps of one size.
        window: consecutive global batches that may exchange samples.
        data_parallel_size: ranks that share a step.
        sample_ms: ms of samples of so many tokens, [S] to [S].
    """

    index: SampleLengths
    batch_sizes: BatchSizes
    window: int
    data_parallel_size: int
    sample_ms: Callable[[np.ndarray], np.ndarray]
    _dealt: dict[int, tuple[np.ndarray, ...]] = field(init=False, default_factory=dict)

    def of_step(self, step: int) -> np.ndarray:
        """Training samples of a step, in order of arrival."""
        if self.window == 1:
            first, size = self.batch_sizes.first_sample(step), self.batch_sizes.size_of(step)
            return self.index.global_batch(first, size)
        return self._dealt_window(step - step % self.window)[step % self.window]

    def lengths_tokens(self, samples: np.ndarray) -> tuple[int, ...]:
        """Tokens of every sample."""
        return tuple(self.index.lengths_of(samples).tolist())

    def later_lengths_tokens(self, step: int) -> tuple[int, ...]:
        """Of the horizon's later steps, in order of arrival: a window changes little in the sum."""
        later_steps = horizon_steps(self.batch_sizes.size_of(step)) - 1
        if later_steps == 0:
            return ()
        first, end = map(self.batch_sizes.first_sample, (step + 1, step + 1 + later_steps))
        return self.lengths_tokens(self.index.global_batch(first, end - first))

    def open_window(self, step: int) -> str | None:
        """Digest of what is left of the window that ``step`` continues; None where one begins."""
        if step % self.window == 0:
            return None
        left = self._dealt_window(step - step % self.window)[step % self.window :]
        return hashlib.sha256(np.concatenate(left).astype("<i8").tobytes()).hexdigest()

    def _dealt_window(self, first: int) -> tuple[np.ndarray, ...]:
        """The global batches of the window that begins with step ``first``; kept until the next."""
        dealt = self._dealt.get(first)
        if dealt is None:
            size = self.batch_sizes.size_of(first)
            samples = self.index.global_batch(first * size, size * self.window)
            batches = assign_window(
                self.sample_ms(self.index.lengths_of(samples)),
                self.window,
                size,
                data_parallel_size=self.data_parallel_size,
            )
            dealt = tuple(samples[list(batch)] for batch in batches)
            before = first - self.window
            kept = {before: self._dealt[before]} if before in self._dealt else {}
            self._dealt = kept | {first: dealt}
        return dealt


def assign_window(
    costs: Sequence[float] | np.ndarray,
    batches: int,
    batch_size: int,
    *,
    data_parallel_size: int = 1,
) -> tuple[tuple[int, ...], ...]:
    """Share out the samples of ``batches`` consecutive global batches.

    A step waits for its slowest rank, so a sample far heavier than the rest costs least where the
    other ranks have one like it, and where its batch is heavy enough to hide it. Samples are
    therefore dealt, heaviest first, in runs of two neighbours by cost for every rank. Every batch
    gets one such run; from then on the next run goes to the batch that lacks most until its
    heaviest sample is twice its mean. Longer runs or a lower multiple would be faster still and the
    batches less alike. A pure function of its arguments.

    Returns:
        For each batch, ascending indices into ``costs``; each index exactly once.

    Raises:
        PlanError: ``costs`` does not hold ``batches * batch_size`` finite values.
    """
    costs_S = np.asarray(costs, dtype=np.float64)
    if min(batches, batch_size, data_parallel_size) < 1 or costs_S.shape != (batches * batch_size,):
        raise PlanError(
            f"window: {costs_S.size} samples for {batches} batches of {batch_size} over "
            f"{data_parallel_size} ranks"
        )
    if not np.isfinite(costs_S).all():
        raise PlanError(f"window: cost of sample {int(np.argmin(np.isfinite(costs_S)))} not finite")
    order = np.argsort(-costs_S, kind="stable")
    members: list[list[int]] = [[] for _ in range(batches)]
    totals, room = np.zeros(batches), np.full(batches, batch_size)
    wanted_totals = np.full(batches, np.inf)
    while len(order):
        size = min(_RUN_PER_RANK * data_parallel_size, len(order), int(room.max()))
        lacking = np.where(room >= size, wanted_totals - totals, -np.inf)
        chosen = int(lacking.argmax())
        run, order = order[:size], order[size:]
        if not members[chosen]:
            wanted_totals[chosen] = batch_size * costs_S[run[0]] / _HEAVIEST_OVER_MEAN
        members[chosen] += run.tolist()
        totals[chosen] += costs_S[run].sum()
        room[chosen] -= size
    return tuple(tuple(sorted(batch)) for batch in members)
