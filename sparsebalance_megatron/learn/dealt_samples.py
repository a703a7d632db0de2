# SPDX-License-Identifier: Apache-2.0
"""An order of samples whose steps have exchanged some within windows.

It follows from the number of a step. A checkpoint in the middle of a window holds which window that
is, and another choice begins after it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from sparsebalance_megatron.config import MOST_WINDOW_STEPS, flag_name
from sparsebalance_megatron.learn.scheduler import BatchSizes, SampleLengths
from sparsebalance_megatron.learn.step_planner import STATE_VERSION_IN_WINDOW, StateError
from sparsebalance_megatron.plan.windows import Windows, window_places

_WINDOWS_KEPT = 4
_Positive = Annotated[int, Meta(ge=1)]


class SavedWindow(NamedTuple):
    """The window in whose middle a checkpoint was written."""

    first_sample: Annotated[int, Meta(ge=0)]
    steps: Annotated[int, Meta(ge=2, le=MOST_WINDOW_STEPS)]
    batch_size: _Positive
    share: Annotated[float, Meta(gt=0, le=1)]


class Rule(NamedTuple):
    """From a step on, windows of so many steps; or one window."""

    first_step: int
    steps: int
    share: float


@dataclass(frozen=True, kw_only=True)
class StepWindow:
    """Step ``number``, from 0, of a window. ``steps_moved``: by its samples from their arrival, on
    average. ``sample_tokens``: of its samples, trained on or not."""

    number: Annotated[int, Meta(ge=0)]
    steps: _Positive
    steps_moved: float
    sample_tokens: int


@dataclass(frozen=True, eq=False)
class DealtSamples:
    """A :class:`.SampleLengths` over another, which is in order of arrival.

    Windows begin anew with a rule and where batch sizes change, and end before either.
    """

    index: SampleLengths
    batch_sizes: BatchSizes
    rules: tuple[Rule, ...]
    seed: int

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
    ) -> DealtSamples:
        """The order of a run that begins, or goes on, with a step.

        Args:
            warm_up_samples: no window begins before so many.
            end_step: of the whole run, before which its last window ends.
            saved: the "window" of :meth:`state`.

        Raises:
            StateError: that window cannot be ended in this run.
        """
        rules = [Rule(0, 1, windows.share)]
        if saved is not None:
            rules.append(_running(saved, batch_sizes, step))
            step = rules[-1].first_step + rules[-1].steps
            rules.append(Rule(step, 1, windows.share))
        begin = max(step, batch_sizes.step_from(warm_up_samples))
        rules.append(Rule(begin, windows.steps, windows.share))
        if end_step is not None and end_step > begin:
            rules.append(Rule(end_step, 1, windows.share))
        return cls(index, batch_sizes, tuple(rules), windows.seed)

    def global_batch(self, first: int, size: int) -> np.ndarray:
        """Samples of the step that begins after ``first``, of its ``size``."""
        step = self.batch_sizes.step_at(first)
        window = self.window_of(step)
        if window.steps == 1:
            return self.index.global_batch(first, size)
        samples_WI, _ = self._dealt(window)
        own_I: np.ndarray = samples_WI[step - window.first_step]
        return own_I

    def lengths_of(self, samples: np.ndarray) -> np.ndarray:
        """Tokens of every sample."""
        return self.index.lengths_of(samples)

    def window_of(self, step: int) -> Rule:
        """The window that a step is in."""
        begin, steps, share = [rule for rule in self.rules if rule.first_step <= step][-1]
        phase_begin, phase_end = self.batch_sizes.phase_around(step)
        begin = max(begin, phase_begin)
        first = begin + (step - begin) // steps * steps
        later = [rule.first_step for rule in self.rules if rule.first_step > step]
        return Rule(first, int(min(first + steps, phase_end, *later) - first), share)

    def describe(self, extra_steps: int) -> tuple[str, ...]:
        """From which iteration on samples change places; ``extra_steps``: iterations before the
        first step."""
        return tuple(
            f"from iteration {first + extra_steps + 1} on samples change places within windows of "
            f"{steps} steps, a share of {share:g} by length ({flag_name('window')})"
            for first, steps, share in self.rules
            if steps > 1
        )

    def step_window(self, step: int) -> StepWindow:
        """Facts about a step, for the log."""
        window = self.window_of(step)
        samples_WI, places_WI = self._dealt(window)
        number = step - window.first_step
        moved_I = np.abs(places_WI[number] // places_WI.shape[1] - number)
        return StepWindow(
            number=number,
            steps=window.steps,
            steps_moved=float(moved_I.mean()),
            sample_tokens=int(self.lengths_of(samples_WI[number]).sum()),
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

    def _deal(self, window: Rule) -> tuple[np.ndarray, np.ndarray]:
        first_step, steps, share = window
        first, size = (
            self.batch_sizes.first_sample(first_step),
            self.batch_sizes.size_of(first_step),
        )
        samples_S = self.index.global_batch(first, steps * size)
        lengths_S = self.index.lengths_of(samples_S)
        places_WI = window_places(lengths_S, steps, share=share, first_sample=first, seed=self.seed)
        return samples_S[places_WI], places_WI


def _running(saved: Any, batch_sizes: BatchSizes, step: int) -> Rule:
    """The window that a checkpoint is in the middle of, as a rule of a run."""
    try:
        first_sample, steps, size, share = msgspec.convert(saved, SavedWindow)
    except msgspec.ValidationError as error:
        raise StateError(
            f"the window in the checkpoint is damaged ({error}); resume from another checkpoint, "
            "or with --finetune"
        ) from error
    first_step = step - (batch_sizes.first_sample(step) - first_sample) // size
    held = range(first_step, first_step + steps)
    alike = first_step >= 0 and all(batch_sizes.size_of(each) == size for each in held)
    if step not in held or not alike or batch_sizes.first_sample(first_step) != first_sample:
        raise StateError(
            f"the checkpoint is in the middle of a window of {steps} steps of {size} samples, "
            "which steps of other sizes cannot end; go on with its --global-batch-size until then"
        )
    return Rule(first_step, steps, share)
