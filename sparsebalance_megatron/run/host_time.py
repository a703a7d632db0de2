# SPDX-License-Identifier: Apache-2.0
"""Host time that the plugin takes from a training step, added up by part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

PARTS = ("plan", "hooks", "reduce", "log")


class HostTime:
    """ms of the current step that this rank spent in the plugin, where training waited for it.

    - ``plan``: waiting for the step's plan.
    - ``hooks``: everything else between the start of a forward step and the model, and around the
      loss: reading, packing, layout, bookkeeping.
    - ``reduce``: gathering measurements at the step's end and learning from them, without the time
      that the device or other ranks take to get there.
    - ``log``: what Megatron's log line gets, and handing over to the logs, that of the step before
      included.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._ms = dict.fromkeys(PARTS, 0.0)
        self._forward_step_began_s: float | None = None

    def add_ms(self, part: str, ms: float) -> None:
        """Count so much for a part."""
        self._ms[part] += ms

    @contextmanager
    def counted(self, part: str) -> Iterator[None]:
        """Count what passes within, for a part."""
        began_s = self.clock()
        yield
        self.add_ms(part, self._since_ms(began_s))

    def begin_forward_step(self) -> None:
        """Begin to count for the plugin, until :meth:`end_forward_step`."""
        self._forward_step_began_s = self.clock()

    def end_forward_step(self, *, plan_wait_ms: float) -> None:
        """Count the time since the forward step began; nothing where that was not seen.

        Args:
            plan_wait_ms: how much of it was spent waiting for the plan.
        """
        began_s, self._forward_step_began_s = self._forward_step_began_s, None
        if began_s is None:
            return
        passed_ms = self._since_ms(began_s)
        plan_ms = min(plan_wait_ms, passed_ms)
        self.add_ms("plan", plan_ms)
        self.add_ms("hooks", passed_ms - plan_ms)

    def take_ms(self) -> dict[str, float]:
        """Sums by part since the last call."""
        taken, self._ms = self._ms, dict.fromkeys(PARTS, 0.0)
        return taken

    def _since_ms(self, began_s: float) -> float:
        return (self.clock() - began_s) * 1e3
