# SPDX-License-Identifier: Apache-2.0
"""Host time that the plugin takes from a training step, added up by part."""

from __future__ import annotations

from collections.abc import Callable

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

    def add_since(self, began_s: float, part: str, *, without_ms: float = 0.0) -> None:
        """Count what has passed since ``began_s``, by the clock, for a part."""
        self._ms[part] += (self.clock() - began_s) * 1e3 - without_ms

    def add_ms(self, part: str, ms: float) -> None:
        """Count so much for a part."""
        self._ms[part] += ms

    def take_ms(self) -> dict[str, float]:
        """Sums by part since the last call."""
        taken, self._ms = self._ms, dict.fromkeys(PARTS, 0.0)
        return taken
