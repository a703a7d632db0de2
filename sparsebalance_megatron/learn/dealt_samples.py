# SPDX-License-Identifier: Apache-2.0
"""An order of samples whose steps have exchanged some within windows.

It follows from the number of a step. A checkpoint in the middle of a window holds which window that
is, and another choice begins after it.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec
import numpy as np

from sparsebalance_megatron.config import MOST_WINDOW_STEPS, flag_name
from sparsebalance_megatron.learn.scheduler import BatchSizes, SampleLengths
from sparsebalance_megatron.learn.step_planner import STATE_VERSION_IN_WINDOW, StateError
from sparsebalance_megatron.plan.windows import Windows, window_places

_WINDOWS_KEPT = 4


class Window(NamedTuple):
    """Consecutive steps; ``share``: see :class:`.Windows`."""

    first_step: int
    steps: int
    share: float


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """Step ``number``, from 0, of a window. ``steps_moved``: by its samples from their arrival, on
    average. ``sample_tokens``: of its samples, trained on or not."""

    number: int
    steps: int
    steps_moved: float
    sample_tokens: int


@dataclass(frozen=True, eq=False)
class DealtSamples:
    """A :class:`.SampleLengths` over another, which is in order of arrival.

    Windows are of the steps from ``begin`` to ``end``, begin anew where batch sizes change, and end
    before that. ``running``: an earlier one, of a checkpoint, which ends before ``begin``.
    """

    index: SampleLengths
    batch_sizes: BatchSizes
    windows: Windows
    begin: int
    end: float
    running: Window | None = None

    @classmethod
    def from_step(
        cls,
        index: SampleLengths,
        batch_sizes: BatchSizes,
        windows: Windows,
        *,
        step: int,
        warm_up_samples: int = 0,
        end_step: int | None = None,
        saved: Any = None,
    ) -> "DealtSamples":
        """The order of a run that begins, or goes on, with a step, and has so many steps in all;
        windows begin after warm-up. ``saved``: the "window" of :meth:`state`. Raises a
        :class:`StateError` where that window cannot be ended in this run."""
        running = None if saved is None else _running(saved, batch_sizes, step)
        if running is not None:
            step = running.first_step + running.steps
        begin, end = batch_sizes.step_from(warm_up_samples), math.inf
        return cls(index, batch_sizes, windows, max(step, begin), end_step or end, running)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Samples of the step that begins after ``first``, of its ``size``."""
        step = self.batch_sizes.step_at(first)
        window = self.window_of(step)
        if window.steps == 1:
            return self.index.global_batch(first, size)
        own_I: np.ndarray = self._dealt(window)[0][step - window.first_step]
        return own_I

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of every sample."""
        return self.index.lengths_of(samples)

    def window_of(self, step: int) -> Window:
        """The window that a step is in, perhaps alone."""
        running, (steps, share, _) = self.running, self.windows
        if running is not None and 0 <= step - running.first_step < running.steps:
            return running
        if not self.begin <= step < self.end:
            return Window(step, 1, share)
        phase = self.batch_sizes.phase_of(step)
        first = step - (step - max(self.begin, phase.first_step)) % steps
        return Window(first, int(min(steps, phase.end_step - first, self.end - first)), share)

    def step_window(self, step: int) -> StepWindow:
        """Facts about a step, for the log."""
        window = self.window_of(step)
        number = step - window.first_step
        samples_I, places_I = (each_WI[number] for each_WI in self._dealt(window))
        return StepWindow(
            number=number,
            steps=window.steps,
            steps_moved=float(np.abs(places_I // len(places_I) - number).mean()),
            sample_tokens=int(self.lengths_of(samples_I).sum()),
        )

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint needs before a step: nothing, except in the middle of a window."""
        first_step, steps, share = self.window_of(step)
        if step == first_step:
            return {}
        sizes = self.batch_sizes
        window = [sizes.first_sample(first_step), steps, sizes.size_of(step), share]
        return {"version": STATE_VERSION_IN_WINDOW, "window": window}

    @cached_property
    def _dealt(self) -> Any:
        """Samples and places of a window, [W, I] each; the last few are kept. Any thread."""
        return lru_cache(_WINDOWS_KEPT)(self._deal)

    def _deal(self, window: Window) -> tuple[np.ndarray, np.ndarray]:
        sizes, steps = self.batch_sizes, window.steps
        first = sizes.first_sample(window.first_step)
        samples_S = self.index.global_batch(first, steps * sizes.size_of(window.first_step))
        places_WI = window_places(
            self.index.lengths_of(samples_S),
            *(steps, self.windows.seed),
            share=window.share,
            first_sample=first,
        )
        return samples_S[places_WI], places_WI


def _running(saved: Any, batch_sizes: BatchSizes, step: int) -> Window:
    """The window that a checkpoint is in the middle of."""
    try:
        first_sample, steps, size, share = msgspec.convert(saved, tuple[int, int, int, float])
    except msgspec.ValidationError:
        first_sample = steps = size = share = 0
    if size >= 1 and steps <= MOST_WINDOW_STEPS:
        first_step = step - (batch_sizes.first_sample(step) - first_sample) // size
        held = range(first_step, first_step + steps)
        if (
            0 <= first_step <= step < held.stop
            and all(batch_sizes.size_of(each) == size for each in held)
            and batch_sizes.first_sample(first_step) == first_sample
        ):
            return Window(first_step, steps, share)
    raise StateError(
        f"the checkpoint is in the middle of a window ({flag_name('window')}) of {steps} steps of "
        f"{size} samples, which steps of other sizes cannot end: go on with its "
        "--global-batch-size until then, or with --finetune"
    )
